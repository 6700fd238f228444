"""A repo whose hub is away: what it was resolved to before, and whether the mirror or a node still has that."""

from dataclasses import dataclass

from activities.contract import ResolveRequest
from activities.resolutions import Resolutions, when
from activities.snapshots import FleetOf
from fleet.hub_away import Holding, Known, hashed, holding, in_catalog, pinned, proven, reported, with_hashes
from fleet.reasons import StepError
from fleet.repos import RepoRef, weights_id
from fleet.spec import ModelFile, ResolvedModel
from fleet.state import FleetState
from runtime.peer_files import listing


@dataclass(frozen=True)
class Elsewhere:
    """Where a worker looks when the hub does not answer."""

    kept: Resolutions
    fleet: FleetOf
    secret: str = ""
    """Opens the nodes' doors; empty: this worker cannot ask them."""

    async def find(self, asked: str, ref: RepoRef, request: ResolveRequest, trouble: StepError) -> ResolvedModel:
        """The repo as it was known last, with a note that says so, if its files are still to be had.

        Raises `trouble`, the hub's own, where they are not; with what is in the way where a node has them.
        """
        state = await self.fleet(request.cell)
        said, in_the_way = trouble.failure.detail, ""
        for known in await self._known(asked, ref, request, state):
            resolved = known.resolved
            if await self.kept.mirrored(resolved):
                return resolved.model_copy(update={"note": f"{said}: the mirror has it as it was on {when(known.at)}"})
            held = holding(state, weights_id(resolved))
            if not held.nodes:
                continue
            files = await self._hashed(resolved, state, held)
            if held.urls and files and self.secret:
                note = f"{said}: {', '.join(held.nodes)} has it as it was on {when(known.at)}"
                return resolved.model_copy(update={"note": note, "files": files, "peers": held.urls})
            in_the_way = in_the_way or f"; {', '.join(held.nodes)} has it, but {self._why_not(held.urls)}"
        told = await self._told_by_nodes(ref, request, state) if self.secret else {}
        if len(told) == 1:
            [(name, resolved)] = told.items()
            nodes = ", ".join(holding(state, name).nodes)
            note = f"{said}: {nodes} has it at {resolved.revision}, which need not be its newest"
            return resolved.model_copy(update={"note": note})
        if told:
            names = sorted(pinned(resolved) for resolved in told.values())
            in_the_way = f"; nodes have {', '.join(names)}: name one of them"
        if not in_the_way:
            raise trouble
        failure = trouble.failure
        raise StepError(failure.reason, f"{said}{in_the_way}", retry_after_s=failure.retry_after_s) from trouble

    async def _known(self, asked: str, ref: RepoRef, request: ResolveRequest, state: FleetState) -> list[Known]:
        """What it may have been, the best first."""
        before = await self.kept.find(asked)
        catalog = in_catalog(state, ref, request.engine, code=request.trust_remote_code)
        found = [Known(resolved=before.resolved, at=before.at)] if before is not None else []
        if catalog is not None and all(weights_id(one.resolved) != weights_id(catalog.resolved) for one in found):
            found.append(catalog)
        return found

    async def _told_by_nodes(
        self, ref: RepoRef, request: ResolveRequest, state: FleetState
    ) -> dict[str, ResolvedModel]:
        """What nodes have of it, by the id of the weights: for where nobody remembers what it was."""
        found: dict[str, ResolvedModel] = {}
        for name, held in reported(state, ref).items():
            files = await listing(held.urls[0], self.secret, name)
            resolved = proven(ref, name, files, request.engine, code=request.trust_remote_code)
            if resolved is not None:
                found[name] = resolved.model_copy(update={"peers": held.urls})
        return found

    async def _hashed(self, resolved: ResolvedModel, state: FleetState, held: Holding) -> tuple[ModelFile, ...]:
        """The files with all hashes, by which alone a node gives them; empty where nobody tells them."""
        name = weights_id(resolved)
        known = (
            with_hashes(resolved, {file.path: file.sha256 for file in resolved.files})
            or with_hashes(resolved, await self.kept.hashes(name))
            or hashed(state, resolved)
        )
        if not known and self.secret and held.urls:
            told = await listing(held.urls[0], self.secret, name)
            return with_hashes(resolved, {file.path: file.sha256 for file in told})
        return known

    def _why_not(self, urls: tuple[str, ...]) -> str:
        if not urls:
            return "gives no files to others (weights.token_file in its agent.yaml)"
        if not self.secret:
            return "this worker cannot ask a node for it (weights_token_file in server.yaml)"
        return "does not tell their hashes"
