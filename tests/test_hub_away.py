"""The hub is away: what the catalog and the notes beside the mirror know, and files that only a node has."""

import json
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pydantic import ByteSize
from temporalio.client import Client
from temporalio.testing import ActivityEnvironment

from activities.check import Check
from activities.contract import CheckRepoRequest, CheckResult, MirrorRequest, MirrorResult, ResolveRequest
from activities.elsewhere import Elsewhere
from activities.mirror import Mirror
from activities.registry import AWAY_AFTER, Registry
from activities.resolutions import DIRECTORY, Resolutions
from agent.peers import PeerServer
from agent.weights import WeightStore
from fleet.hub_away import in_catalog, pinned, proven, reported
from fleet.inputs import spec_of
from fleet.paper import CheckWish
from fleet.reasons import Reason, StepError
from fleet.repos import default_name, parse_repo, weights_id
from fleet.spec import Engine, Format, JobRequest, ModelFile, ModelSpec, ResolvedModel, ShardNeed, Weights
from fleet.state import FleetState
from runtime.config import HubConfig, MirrorConfig, WeightsConfig
from tests.fleets import fleet, inventory
from tests.headers import QWEN, TENSOR, safetensors
from tests.stub_hub import COMMIT, Fault, Hub, stub_hub

SECRET = "a secret of the fleet"
FILES = {"config.json": json.dumps(QWEN).encode(), "model.safetensors": safetensors(TENSOR, 16)}


@pytest.fixture
def hub() -> Iterator[Hub]:
    with stub_hub(FILES) as served:
        yield served


class Site:
    """A worker with its mirror, and a node that gives its files to others."""

    def __init__(self, root: Path, hub: Hub) -> None:
        self.hub = hub
        self.config = HubConfig(endpoint=hub.url)
        self.mirror = MirrorConfig(path=root / "mirror", keep_free=ByteSize(0))
        self.store = WeightStore(root / "n1", 0, WeightsConfig(hub_cache=None), secret=SECRET)
        self.door = PeerServer(self.store.offers, SECRET)
        self.state = FleetState()

    async def resolve(self, repo: str = "org/name", *, secret: bool = True) -> ResolvedModel:
        async def of(cell: str) -> FleetState:
            return self.state

        elsewhere = Elsewhere(Resolutions(self.mirror.address), of, SECRET if secret else "")
        request = ResolveRequest(repo=repo)
        environment = ActivityEnvironment()
        environment.info = replace(environment.info, attempt=AWAY_AFTER)
        found: ResolvedModel = await environment.run(Registry(self.config, elsewhere).resolve_model, request)
        return found

    async def fill(self, resolved: ResolvedModel) -> MirrorResult:
        mirror = Mirror(self.mirror, self.config, SECRET)
        found: MirrorResult = await ActivityEnvironment().run(mirror.mirror_model, MirrorRequest(resolved=resolved))
        return found

    async def only_on_the_node(self) -> Weights:
        """A model was served; then its copy in the mirror went, and the hub too."""
        weights = (await self.fill(await self.resolve())).weights
        await self.store.bring(weights, lambda done, total: None)
        await self.store.close()
        await ActivityEnvironment().run(Mirror(self.mirror, self.config).discard_weights, weights)
        self.state = fleet({"n1": inventory(weights=self.store.held(), peer_url=self.door.url)})
        self.hub.faults.append(Fault("api", 999, status=500))
        self.hub.faults.append(Fault("resolve", 999, status=500))
        return weights

    async def why_not(self, **more: Any) -> str:
        with pytest.raises(StepError) as caught:
            await self.resolve(**more)
        assert caught.value.failure.reason is Reason.HUB_UNREACHABLE
        return caught.value.failure.detail


@pytest.fixture
async def site(tmp_path: Path, hub: Hub) -> AsyncIterator[Site]:
    made = Site(tmp_path, hub)
    made.door.open("127.0.0.1", 0)
    try:
        yield made
    finally:
        made.door.close()


async def test_what_only_a_node_has_comes_from_there(site: Site) -> None:
    weights = await site.only_on_the_node()
    found = await site.resolve()
    assert found.note.startswith(f"{site.hub.url} answers 500 for org/name: n1 has it as it was on 20")
    assert (weights_id(found), found.revision, found.peers) == (weights.model_id, COMMIT, (site.door.url,))
    result = await site.fill(found)
    assert (result.outcome, result.peer_bytes) == ("copied", sum(map(len, FILES.values())))
    assert result.weights == weights
    again = await site.resolve()
    assert "the mirror has it as it was on 20" in again.note
    assert again.peers == ()


async def test_a_check_reads_it_there(site: Site, client: Client) -> None:
    await site.only_on_the_node()
    check = Check(client, site.mirror, site.config, SECRET)
    wish = CheckWish.model_validate({"repo": "org/name", "paper": {"ram": "64GiB"}})
    request = CheckRepoRequest(resolved=await site.resolve(), wish=wish)
    found: CheckResult = await ActivityEnvironment().run(check.check_repo, request)
    assert (found.architecture, found.reason) == ("Qwen2ForCausalLM", None)


async def test_the_catalog_knows_it_where_no_note_does(site: Site) -> None:
    weights = await site.only_on_the_node()
    for note in (site.mirror.directory(DIRECTORY)).iterdir():
        note.unlink()
    site.state = fleet({"n1": site.state.nodes["n1"].inventory}, catalogued("org/name", weights))
    found = await site.resolve()
    assert "n1 has it as it was on 1970-01-01" in found.note
    assert (await site.fill(found)).weights == weights


async def test_nodes_say_at_which_commit_they_have_it_where_nobody_else_knows(site: Site) -> None:
    weights = await site.only_on_the_node()
    for note in site.mirror.directory(DIRECTORY).iterdir():
        note.unlink()
    found = await site.resolve()
    assert found.note.endswith(f": n1 has it at {COMMIT[:12]}, which need not be its newest")
    assert (await site.fill(found)).weights == weights.model_copy(update={"hub": ""})
    assert (await site.resolve(f"org/name@{COMMIT}")).note == found.note.replace(
        "for org/name:", f"for org/name@{COMMIT}:"
    )
    assert "has it" not in await site.why_not(repo="org/name@main"), "what a branch was is not known"
    assert "has it" not in await site.why_not(repo="org/nam"), "another repo, although its name begins so"
    # The same model at another commit.
    other = weights.model_copy(update={"model_id": weights.model_id.replace(COMMIT[:12], "fedcba987654")})
    await site.store.bring(other, lambda done, total: None)
    await site.store.close()
    site.state = fleet({"n1": inventory(weights=site.store.held(), peer_url=site.door.url)})
    for note in site.mirror.directory(DIRECTORY).iterdir():
        note.unlink()
    assert (await site.why_not()).endswith(
        f"; nodes have org/name@{COMMIT[:12]}, org/name@fedcba987654: name one of them"
    )
    assert (await site.resolve("org/name@fedcba987654")).revision == "fedcba987654"


async def test_what_is_in_the_way_is_said(site: Site) -> None:
    weights = await site.only_on_the_node()
    trouble = f"{site.hub.url} answers 500 for org/name"
    said = await site.why_not(secret=False)
    assert said == f"{trouble}; n1 has it, but this worker cannot ask a node for it (weights_token_file in server.yaml)"
    (site.mirror.directory(DIRECTORY) / f"{weights.model_id}.json").unlink()
    assert (await site.resolve()).peers, "the node tells the hashes"
    site.store.offers.drop(site.store.directory(weights))
    assert await site.why_not() == f"{trouble}; n1 has it, but does not tell their hashes"
    site.state = fleet({"n1": inventory(weights=site.store.held())})
    said = await site.why_not()
    assert said == f"{trouble}; n1 has it, but gives no files to others (weights.token_file in its agent.yaml)"
    site.state = fleet({"n1": inventory()})
    assert await site.why_not() == trouble
    assert await site.why_not(repo="org/name@v1") == trouble.replace("org/name", "org/name@v1")


def catalogued(repo: str, weights: Weights, **more: Any) -> ModelSpec:
    request = JobRequest.model_validate({"repo": repo, **more})
    return spec_of(
        default_name(parse_repo(repo)),
        request,
        repo=f"hf:org/name@{COMMIT}",
        engine=Engine.VLLM,
        weights=weights,
        need=ShardNeed(memory=1),
        context_length=256,
    )


@pytest.mark.parametrize(
    ("served", "asked", "engine", "known"),
    [
        ("org/name", "org/name", None, True),
        ("org/name", "hf:org/name", Engine.VLLM, True),
        ("org/name", f"org/name@{COMMIT}", None, True),
        ("org/name", "org/name@main", None, False),  # what a branch was is not what another was
        ("org/name@v2", "org/name@v2", None, True),
        ("org/name@v2", "org/name", None, False),
        ("org/name", "org/other", None, False),
        ("org/name", "org/name:Q4_K_M", None, False),
        ("org/name", "org/name", Engine.LLAMACPP, False),
    ],
)
async def test_the_catalog_knows_the_same_reference(
    site: Site, served: str, asked: str, engine: Engine | None, known: bool
) -> None:
    resolved = await site.resolve()
    weights = (await site.fill(resolved)).weights
    state = fleet({}, catalogued(served, weights))
    found = in_catalog(state, parse_repo(asked), engine, code=False)
    assert (found is not None) is known
    assert in_catalog(state, parse_repo(asked), engine, code=True) is None
    if found is not None:
        urls = {file.path: file.url for file in resolved.files}
        whole = tuple(file.model_copy(update={"url": urls[file.path]}) for file in weights.files)
        assert found.resolved == resolved.model_copy(update={"files": whole})


def test_variants_that_nodes_have_are_told_apart() -> None:
    ref = parse_repo("org/name")
    files = [(ModelFile(path=f"m-{quant}.gguf", size=1, sha256="00"),) for quant in ("Q4_0", "Q8_0")]
    names = [
        weights_id(
            ResolvedModel(repo="hf:org/name", revision=COMMIT[:12], format=Format.GGUF, entry=one.path, files=(one,))
        )
        for (one,) in files
    ]
    state = fleet({"n1": inventory(weights=tuple(names), peer_url="http://n1"), "n2": inventory(weights=(names[0],))})
    assert {name: held.nodes for name, held in reported(state, ref).items()} == {
        names[0]: ("n1", "n2"),
        names[1]: ("n1",),
    }
    found = [proven(ref, name, listed, None, code=False) for name, listed in zip(names, files, strict=True)]
    assert [pinned(one) for one in found if one is not None] == [
        f"org/name@{COMMIT[:12]}:Q4_0",
        f"org/name@{COMMIT[:12]}:Q8_0",
    ]
    assert proven(ref, names[0], files[1], None, code=False) is None, "the id is that of other files"
    assert proven(parse_repo("org/name:Q8_0"), names[0], files[0], None, code=False) is None
    assert proven(ref, names[0], files[0], Engine.VLLM, code=False) is None
    assert proven(parse_repo("org/other"), names[0], files[0], None, code=False) is None
