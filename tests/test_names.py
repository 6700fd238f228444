"""Names of models: one for people, as they typed it, and one safe id for machines, from job to answer."""

import asyncio
import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from urllib.parse import quote

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route as Path_
from temporalio.client import Client
from temporalio.common import SearchAttributeKey

from activities import contract
from activities.contract import NameArg, Routes
from activities.node_contract import ShardRef
from agent.layout import shard_key
from fleet.spec import ModelName, safe_id
from fleet.state import Decision
from gateway.app import build_app
from gateway.balance import Balance
from gateway.hold import Hold
from gateway.relay import Relay, relay_client
from gateway.routes import RouteTable
from runtime.engine_keys import EngineKeys
from tests.control import Answers, Cell, control_plane
from tests.ctl import ctl_of
from tests.fleets import GIB
from tests.gateway_fakes import serving

CHINESE = "模型/ü Q4_K_M:v1"
NAMES = (
    "x" * 250,
    "模" * 250,
    "A/B",
    CHINESE,
    "-dash",
    "--help",
    "two words",
    "quo\"te's",
    "..",
    "...",
    "a/../b",
    "/etc/passwd",
    "%2F",
    "A%2FB",
    "😀 emoji",
    "\u00e9",  # é as one sign
    "e\u0301",  # é as two
    "Name",
    "name",
    "NAME",
    "p" * 200 + "1",
    "p" * 200 + "2",
    "$(id); `id` && *",
    "a\\b|c<d>[e](f)",
    "null",
    "0",
)
SERVED = ("x" * 250, "A/B", CHINESE, "-dash", "..", "%2F", "quo\"te's", "\u00e9", "e\u0301", "Name", "name")
"""Those that stand for the others on a real server, where each costs two jobs."""
MODEL = SearchAttributeKey.for_keyword(contract.SEARCH_MODEL)
SAFE = re.compile(r"[a-z0-9](?:[a-z0-9-]{0,47}[a-z0-9])?")
"""At most 49 characters: a DNS label with room for an ordinal, and safe in a file's name, a workflow id and a label."""

ANY_NAME = st.text(st.characters(exclude_categories=("Cs", "Cc", "Zl", "Zp")), min_size=1, max_size=250)


# -- the safe id ------------------------------------------------------------------------------------------------------


@given(ANY_NAME)
def test_an_id_is_safe_everywhere(name: str) -> None:
    assert SAFE.fullmatch(safe_id(name))
    assert shard_key(ShardRef(replica=f"{safe_id(name)}-999", generation=1)) == f"{safe_id(name)}-999.0"


@given(ANY_NAME, ANY_NAME)
def test_different_names_have_different_ids(one: str, other: str) -> None:
    assert (safe_id(one) == safe_id(other)) == (one == other)


@given(ANY_NAME)
def test_names_that_look_alike_have_different_ids(name: str) -> None:
    alike = {name, name.lower(), name.upper(), name + "-", f" {name}", name * 2}
    assert len({safe_id(one) for one in alike}) == len(alike)


def test_each_name_of_the_table_has_an_id_of_its_own() -> None:
    assert len({safe_id(name) for name in NAMES}) == len(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_the_table_holds_names_that_are_allowed(name: str) -> None:
    assert TypeAdapter(ModelName).validate_python(name) == name


@pytest.mark.parametrize("name", ["", "x" * 251, " x", "x ", "a\nb", "a\x00b", "a\u2028b", "\ud800"])
def test_what_is_no_name_is_refused(name: str) -> None:
    with pytest.raises(ValidationError):
        TypeAdapter(ModelName).validate_python(name)


# -- from the job to the answer ---------------------------------------------------------------------------------------


class FleetOf:
    """The routes of a test's cell, asked as the gateway asks."""

    def __init__(self, cell: Cell) -> None:
        self._cell = cell

    async def routes(self) -> Routes:
        routes: Routes = await self._cell.fleet.query(contract.QUERY_ROUTES, result_type=Routes)
        return routes

    async def wanted(self, model: str) -> None:
        await self._cell.fleet.signal(contract.SIGNAL_WANTED, NameArg(name=model))


async def say_the_model(request: Request) -> Response:
    """An engine that answers with the name it was asked for, as its alias is."""
    return JSONResponse({"model": (await request.json())["model"]})


@asynccontextmanager
async def front_door(cell: Cell) -> AsyncIterator[httpx.AsyncClient]:
    fleet, balance = FleetOf(cell), Balance(lambda: 0.0)
    table = RouteTable(fleet, balance)
    async with relay_client(EngineKeys()) as relay:
        app = build_app(table, Relay(relay, balance), Hold(table, fleet, 0))
        async with serving(app) as url, httpx.AsyncClient(base_url=url, trust_env=False, timeout=20) as client:
            await table.refresh()  # nobody polls in this test
            yield client


async def test_every_name_goes_from_the_job_to_the_clients_answer_and_back(client: Client) -> None:
    engine = Starlette(routes=[Path_("/v1/chat/completions", say_the_model, methods=["POST"])])
    async with (
        serving(engine) as url,
        control_plane(client, answers=Answers(memory=GIB)) as cell,
        cell.node("n1", memory=100 * GIB, url=url) as node,
    ):
        await node.join()
        results = await asyncio.gather(*(cell.run({"repo": "file:/m.gguf", "name": name}) for name in SERVED))
        assert [result.model for result in results] == list(SERVED)
        assert all(result.sentence.startswith(f"{result.model} is serving") for result in results)

        state = await cell.state()
        assert {model.spec.name: key for key, model in state.models.items()} == {n: safe_id(n) for n in SERVED}
        assert sorted(state.replicas) == sorted(f"{safe_id(name)}-0" for name in SERVED)
        assert {start.shard.replica: start.model for start in node.started} == {f"{safe_id(n)}-0": n for n in SERVED}
        for name in SERVED:
            workflow = client.get_workflow_handle(contract.replica_id(f"{safe_id(name)}-0", cell.name))
            found = await workflow.describe()
            assert found.typed_search_attributes[MODEL] == name
            told: Decision = await cell.fleet.query(contract.QUERY_EXPLAIN, NameArg(name=name), result_type=Decision)
            assert told.model == safe_id(name)

        async with front_door(cell) as door:
            listed = (await door.get("/v1/models")).json()["data"]
            assert sorted(entry["id"] for entry in listed) == sorted(SERVED)
            for name in SERVED:
                assert (await door.post("/v1/chat/completions", json={"model": name})).json() == {"model": name}
                if name != "..":  # HTTP clients resolve that before they send it
                    one = await door.get(f"/v1/models/{quote(name, safe='')}")
                    assert one.json()["id"] == name

        await asyncio.gather(*(cell.run({"kind": "remove", "name": name}) for name in SERVED))
        assert (await cell.state()).models == {}
        assert node.running == {}


# -- ctl --------------------------------------------------------------------------------------------------------------


async def test_ctl_takes_a_name_that_is_odd_in_every_way(client: Client, tmp_path: Path) -> None:
    name = f"-{CHINESE}"
    async with control_plane(client) as cell, cell.node("n1") as node:
        await node.join()
        ctl = ctl_of(cell, tmp_path / "ctl")
        code, out, err = await ctl.run("model", "serve", "file:/m.gguf", f"--name={name}")
        assert code == 0, err
        assert f"{name} is serving" in out
        code, out, err = await ctl.run("model", "list", "--json")
        assert [view["name"] for view in json.loads(out)] == [name]
        code, out, err = await ctl.run("model", "explain", "--", name)
        assert code == 0, err
        assert name in out
        code, out, err = await ctl.run("model", "scale", "--", name, "2")
        assert code == 0, err
        assert (await cell.state()).models[safe_id(name)].spec.replicas == 2
        code, out, err = await ctl.run("model", "jobs", "--json")
        assert [job["model"] for job in json.loads(out) if f"/{safe_id(name)}/" in job["id"]] == [name]
        code, out, err = await ctl.run("model", "remove", "--", name)
        assert code == 0, err
        assert (await cell.state()).models == {}
