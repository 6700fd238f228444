"""What a look at an engine means: nobody is there only where nobody listens."""

import pytest

from agent.probe import Health, Probe
from tests.gateway_fakes import answering_once, free_port

TEXT = b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nx 1\n"


@pytest.mark.parametrize(
    ("reply", "metrics", "health"),
    [
        (TEXT, "x 1\n", Health.SERVING),
        (b"HTTP/1.1 503 Busy\r\nContent-Length: 0\r\n\r\n", "", Health.NOT_SERVING),
        (b"", "", Health.NOT_SERVING),
        (TEXT[:-2], "", Health.NOT_SERVING),
    ],
    ids=["an answer", "an error", "nothing", "half an answer"],
)
async def test_an_engine_that_breaks_off_is_still_there(reply: bytes, metrics: str, health: Health) -> None:
    """A drain would otherwise take it for gone, and end what it has in flight."""
    async with Probe() as probe:
        async with answering_once(reply) as url:
            assert await probe.metrics(url) == metrics
            assert (await probe.health(url, "/health")).health is health


async def test_nobody_listens() -> None:
    async with Probe() as probe:
        url = f"http://127.0.0.1:{free_port()}"
        assert await probe.metrics(url) is None
        assert (await probe.health(url, "/health")).health is Health.REFUSED
