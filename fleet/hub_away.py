"""What the fleet knows of a repo while its hub is away: what the catalog took it for, and which nodes have it."""

from fleet.architectures import FORMATS
from fleet.peers import address
from fleet.reasons import LlmgwError
from fleet.records import Record
from fleet.repos import RepoRef, choose_files, file_url, parse_repo, variant_of, weights_id
from fleet.spec import Engine, ModelFile, ModelSpec, ResolvedModel, safe_id
from fleet.state import FleetState, NodeState


class Known(Record):
    """A reference as it was resolved once."""

    resolved: ResolvedModel
    at: float
    """Seconds since the epoch."""


class Holding(Record):
    """The nodes that report to have a model's files whole."""

    nodes: tuple[str, ...] = ()
    urls: tuple[str, ...] = ()
    """Where those of them that give files to others do so."""


def in_catalog(state: FleetState, ref: RepoRef, engine: Engine | None, *, code: bool) -> Known | None:
    """What the catalog took the same reference for last; None where no model of it came from there."""
    found: list[Known] = []
    for model in state.models.values():
        resolved = _resolved(model.spec, ref)
        if resolved is None or model.spec.trust_remote_code != code:
            continue
        if engine is None or FORMATS[engine] is resolved.format:
            found.append(Known(resolved=resolved, at=model.applied_at))
    return max(found, key=lambda known: known.at, default=None)


def hashed(state: FleetState, resolved: ResolvedModel) -> tuple[ModelFile, ...]:
    """The files with the hashes that the catalog keeps of the same bytes; empty where it does not know them."""
    name = weights_id(resolved)
    for model in state.models.values():
        if model.spec.weights.model_id == name:
            known = {file.path: file for file in model.spec.weights.files}
            if all(file.path in known and known[file.path].size == file.size for file in resolved.files):
                return with_hashes(resolved, {path: file.sha256 for path, file in known.items()})
    return ()


def with_hashes(resolved: ResolvedModel, hashes: dict[str, str]) -> tuple[ModelFile, ...]:
    """Its files with these hashes by path; empty where one is not among them, or contradicts the hub's."""
    found = []
    for file in resolved.files:
        digest = hashes.get(file.path, "")
        if not digest or file.sha256 not in ("", digest):
            return ()
        found.append(file.model_copy(update={"sha256": digest}))
    return tuple(found)


def holding(state: FleetState, name: str) -> Holding:
    """Which members have the weights of this id."""
    nodes = sorted(
        node.id for node in state.nodes.values() if name in node.inventory.weights and node.state is not NodeState.LOST
    )
    return Holding(nodes=tuple(nodes), urls=tuple(url for node in nodes if (url := address(state, node))))


def reported(state: FleetState, ref: RepoRef) -> dict[str, Holding]:
    """Weights that nodes report, give to others, and by their ids may be of this repo."""
    begins = safe_id(ref.repo)[: -len("-01234567")]  # without the hash: those of its files go on from here
    names = {name for node in state.nodes.values() for name in node.inventory.weights if name.startswith(begins)}
    held = {name: holding(state, name) for name in sorted(names)}
    return {name: one for name, one in held.items() if one.urls}


def proven(
    ref: RepoRef, name: str, files: tuple[ModelFile, ...], engine: Engine | None, *, code: bool
) -> ResolvedModel | None:
    """The repo at the revision in the id of these weights; None where they are not of it, or not what is asked for.

    The id holds a hash of repo and entry, so that what agrees with it is what it was made of.
    """
    revision = name.rpartition("-")[2]
    if ref.revision and not ref.revision.startswith(revision):
        return None
    try:
        choice = choose_files(files, ref.variant, FORMATS[engine] if engine is not None else None, code=code)
    except LlmgwError:
        return None
    found = ResolvedModel(
        repo=ref.repo, revision=revision, format=choice.format, entry=choice.entry, files=choice.files
    )
    return found if weights_id(found) == name and len(choice.files) == len(files) else None


def pinned(resolved: ResolvedModel) -> str:
    """What a person types to mean exactly this: `org/name@0123456789ab:Q4_K_M`."""
    variant = f":{variant_of(resolved.entry)}" if resolved.entry else ""
    return f"{resolved.repo.removeprefix('hf:')}@{resolved.revision}{variant}"


def _resolved(spec: ModelSpec, ref: RepoRef) -> ResolvedModel | None:
    """The spec's weights as the registry gave them, if that was for the same reference."""
    repo, _, commit = spec.repo.rpartition("@")
    asked = _reference(spec.request.repo if spec.request is not None else None)
    if asked is None or not spec.weights.hub or (asked.scheme, asked.location) != (ref.scheme, ref.location):
        return None
    if asked.variant.lower() != ref.variant.lower() or ref.revision not in (asked.revision, commit):
        return None
    base = spec.weights.hub
    return ResolvedModel(
        repo=repo,
        revision=commit,
        format=spec.weights.format,
        entry=spec.weights.entry,
        files=tuple(file.model_copy(update={"url": file_url(base, file.path)}) for file in spec.weights.files),
    )


def _reference(text: str | None) -> RepoRef | None:
    try:
        return parse_repo(text or "")
    except LlmgwError:
        return None  # an older version took what this one does not
