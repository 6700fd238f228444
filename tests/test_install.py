"""Engine installations for real, from a package made here: once, whole, and never a broken one."""

import asyncio
import os
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest

from agent.engines import ADAPTERS
from agent.install import Installs, install_environment, telling_line
from agent.install_progress import InstallProgress
from agent.pip_settings import as_uv_reads
from fleet.reasons import Reason, StepError
from fleet.spec import Engine
from runtime.config import EngineConfig
from tests.fake_engines.node import FakeAdapter
from tests.waiting import until


def wheel(directory: Path, version: str, code: str = "") -> Path:
    """A wheel `tinyengine` of that version."""
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"tinyengine-{version}-py3-none-any.whl"
    info = f"tinyengine-{version}.dist-info"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("tinyengine.py", code)
        archive.writestr("tinyengine_later.py", "")
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: tinyengine\nVersion: {version}\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return path


@dataclass(frozen=True)
class WheelAdapter(FakeAdapter):
    """Installs a wheel from the disk, so that no network is asked."""

    module: str = "tinyengine"
    wheels: Path = Path()

    def packages(self, version: str, *, gpus: bool) -> tuple[str, ...]:
        return (str(self.wheels / f"tinyengine-{version}-py3-none-any.whl"),)


def installs(tmp_path: Path, config: EngineConfig) -> Installs:
    adapters = {Engine.LLAMACPP: WheelAdapter(wheels=tmp_path / "wheels")}
    return Installs(tmp_path / "engines", {Engine.LLAMACPP: config}, adapters)


async def test_two_starts_install_once_and_a_later_agent_not_again(tmp_path: Path) -> None:
    wheel(tmp_path / "wheels", "1.0")
    first, second = (installs(tmp_path, EngineConfig(version="1.0")) for _ in range(2))
    assert [offer.installed for offer in first.offers()] == [False]
    pythons = await asyncio.gather(
        first.ensure(Engine.LLAMACPP, gpus=False), second.ensure(Engine.LLAMACPP, gpus=False)
    )
    assert pythons[0] == pythons[1]
    assert len([path for path in (tmp_path / "engines").iterdir() if path.is_dir()]) == 1
    compiled = {path.name.partition(".")[0] for path in pythons[0].parent.parent.rglob("__pycache__/tinyengine*.pyc")}
    assert compiled == {"tinyengine", "tinyengine_later"}, "so the first start need not"
    process = await asyncio.create_subprocess_exec(str(pythons[0]), "-c", "import tinyengine")
    assert await process.wait() == 0
    later = installs(tmp_path, EngineConfig(version="1.0"))
    assert later.python(Engine.LLAMACPP) == pythons[0]
    assert [(offer.version, offer.installed) for offer in later.offers()] == [("1.0", True)]
    assert installs(tmp_path, EngineConfig(version="2.0")).python(Engine.LLAMACPP) is None


@dataclass(frozen=True)
class NamedAdapter(WheelAdapter):
    """Asks for the package by its name, as the real ones do."""

    def packages(self, version: str, *, gpus: bool) -> tuple[str, ...]:
        return (f"tinyengine=={version}",)


async def test_uv_finds_what_pip_is_set_up_for_and_tells_how_far_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheel(tmp_path / "a", "1.0")
    wheel(tmp_path / "b", "2.0")
    monkeypatch.setenv("PIP_FIND_LINKS", f"{tmp_path / 'a'} {tmp_path / 'b'}")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("UV_CACHE_DIR", str(tmp_path / "cache"))  # what it has already it does not prepare again
    for name in ("UV_FIND_LINKS", "UV_NO_INDEX", "UV_DEFAULT_INDEX", "UV_INDEX"):
        monkeypatch.delenv(name, raising=False)
    made = Installs(
        tmp_path / "engines", {Engine.LLAMACPP: EngineConfig(version="2.0")}, {Engine.LLAMACPP: NamedAdapter()}
    )
    told: list[str] = []
    late: list[str] = []
    first, second = await asyncio.gather(
        made.ensure(Engine.LLAMACPP, gpus=False, say=told.append),
        made.ensure(Engine.LLAMACPP, gpus=False, say=late.append),
    )
    assert first == second
    assert [words for index, words in enumerate(told) if words not in told[:index]] == [
        "making its environment",
        "resolving",
        "downloading 1 package",
        "installing 1 package",
        "compiling 1 package",
        "installed 1 package",
        "trying it: import tinyengine",
    ]
    assert set(late) == {"another start installs it"}


@pytest.mark.parametrize("version", ["1.0", "2.0"])
async def test_the_best_of_the_index_and_the_further_one_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str
) -> None:
    for index, has in (("usual", "1.0"), ("further", "2.0")):
        page = wheel(tmp_path / index / "tinyengine", has).with_name("index.html")
        name = f"tinyengine-{has}-py3-none-any.whl"
        page.write_text(f'<!DOCTYPE html><html><body><a href="{name}">{name}</a></body></html>')
    for name in [name for name in os.environ if name.startswith(("PIP_", "UV_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("UV_DEFAULT_INDEX", (tmp_path / "usual").as_uri())
    monkeypatch.setenv("UV_CACHE_DIR", str(tmp_path / "cache"))
    config = EngineConfig(version=version, extra_index=(tmp_path / "further").as_uri())
    made = Installs(tmp_path / "engines", {Engine.LLAMACPP: config}, {Engine.LLAMACPP: NamedAdapter()})
    python = await made.ensure(Engine.LLAMACPP, gpus=False)
    assert list(python.parent.parent.glob(f"lib/python*/site-packages/tinyengine-{version}.dist-info"))


def test_what_uv_says_in_a_few_words() -> None:
    progress = InstallProgress()
    for line, words in (
        ("Using Python 3.11.7 environment at: v", "resolving"),
        ("Resolved 151 packages in 1.18s", "downloading 151 packages"),
        ("Downloading triton (272.5MiB)", "downloading 151 packages: 0 of 1 large ones done, now triton (272.5MiB)"),
        ("   Building slow @ file:///x", "downloading 151 packages: 0 of 1 large ones done, now triton (272.5MiB)"),
        ("   Building slow==1.0", "downloading 151 packages: 0 of 2 large ones done, now triton (272.5MiB)"),
        (" Downloaded triton", "downloading 151 packages: 1 of 2 large ones done, now slow==1.0"),
        ("      Built slow==1.0", "downloading 151 packages: 2 of 2 large ones done"),
        ("Prepared 3 packages in 1.90s", "installing 151 packages"),
        ("Installed 151 packages in 179ms", "compiling 151 packages"),
        ("Bytecode compiled 21000 files in 14.31s", "installed 151 packages"),
        (" + torch==2.13.0+cpu", "installed 151 packages"),
    ):
        progress.read(line)
        assert progress.words == words


@pytest.mark.parametrize(
    ("version", "code", "telling"),
    [("1.0", "raise ImportError('libtiny.so is missing')", "ImportError: libtiny.so is missing"), ("9.9", None, "9.9")],
)
async def test_a_broken_install_is_an_answer_and_leaves_nothing(
    tmp_path: Path, version: str, code: str | None, telling: str
) -> None:
    if code is not None:
        wheel(tmp_path / "wheels", version, code)
    with pytest.raises(StepError) as caught:
        await installs(tmp_path, EngineConfig(version=version)).ensure(Engine.LLAMACPP, gpus=False)
    assert caught.value.failure.reason is Reason.INSTALL_FAILED
    assert telling in caught.value.failure.detail
    assert str(tmp_path / "engines") in caught.value.failure.detail
    assert [path for path in (tmp_path / "engines").iterdir() if path.is_dir()] == []
    assert installs(tmp_path, EngineConfig(version=version)).python(Engine.LLAMACPP) is None


async def test_a_cancelled_install_leaves_no_process_and_no_directory(tmp_path: Path) -> None:
    mark = tmp_path / "importing"
    wheel(
        tmp_path / "wheels",
        "1.0",
        f"import os, signal\nopen({str(mark)!r}, 'w').write(str(os.getpid()))\nsignal.pause()",
    )
    made = installs(tmp_path, EngineConfig(version="1.0"))
    task = asyncio.create_task(made.ensure(Engine.LLAMACPP, gpus=False))
    pid = await until(lambda: mark.exists() and mark.read_text(), 60)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not Path(f"/proc/{pid}").exists()
    assert [path for path in (tmp_path / "engines").iterdir() if path.is_dir()] == []


async def test_what_a_killed_install_left_goes_with_the_next(tmp_path: Path) -> None:
    wheel(tmp_path / "wheels", "1.0")
    left = tmp_path / "engines" / "llamacpp-1.0-0badcafe"
    other = tmp_path / "engines" / "llamacpp-1.0.post1-0badcafe"
    for path in (left, other):
        path.mkdir(parents=True)
    (tmp_path / "engines" / "llamacpp-1.0.json").write_text("{")
    await installs(tmp_path, EngineConfig(version="1.0")).ensure(Engine.LLAMACPP, gpus=False)
    assert not left.exists()
    assert other.exists()


async def test_an_interpreter_of_ones_own_is_used_as_it_is(tmp_path: Path) -> None:
    made = installs(tmp_path, EngineConfig(bin=Path(sys.executable)))
    assert [(offer.version, offer.installed) for offer in made.offers()] == [("local", True)], "it has none"
    assert await made.ensure(Engine.LLAMACPP, gpus=False) == Path(sys.executable)
    assert not (tmp_path / "engines").exists()


async def test_an_interpreter_of_ones_own_tells_which_version_it_has(tmp_path: Path) -> None:
    wheel(tmp_path / "wheels", "1.0")
    python = await installs(tmp_path, EngineConfig(version="1.0")).ensure(Engine.LLAMACPP, gpus=False)
    own = installs(tmp_path, EngineConfig(bin=python))
    assert [(offer.version, offer.installed) for offer in own.offers()] == [("1.0", True)]
    (info,) = python.parent.parent.glob("lib/python*/site-packages/tinyengine-1.0.dist-info")
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: tinyengine-cpu\nVersion: 1.1\n")
    (info / "top_level.txt").write_text("tinyengine\n")
    info.rename(info.with_name("tinyengine_cpu-1.1.dist-info"))
    assert [offer.version for offer in own.offers()] == ["1.0"], "asked once"
    assert installs(tmp_path, EngineConfig(bin=python)).version(Engine.LLAMACPP) == "1.1", "under another name"
    stated = installs(tmp_path, EngineConfig(bin=python, version="2.0+ours"))
    assert stated.version(Engine.LLAMACPP) == "2.0+ours"
    gone = installs(tmp_path, EngineConfig(bin=tmp_path / "none"))
    assert [(offer.version, offer.installed) for offer in gone.offers()] == [("local", False)]
    silent = tmp_path / "silent"
    silent.write_text("no program")
    silent.chmod(0o755)
    assert installs(tmp_path, EngineConfig(bin=silent)).version(Engine.LLAMACPP) == "local"


@pytest.mark.parametrize(
    ("engine", "config", "telling"),
    [
        (Engine.LLAMACPP, EngineConfig(bin=Path("/no/such/python")), "/no/such/python"),
        (Engine.SGLANG, EngineConfig(), "neither version nor bin"),
        (Engine.VLLM, None, "does not name the engine vllm"),
    ],
)
async def test_what_cannot_be_offered(
    tmp_path: Path, engine: Engine, config: EngineConfig | None, telling: str
) -> None:
    made = Installs(tmp_path / "engines", {} if config is None else {engine: config}, ADAPTERS)
    with pytest.raises(StepError, match=telling) as caught:
        await made.ensure(engine, gpus=False)
    assert caught.value.failure.reason is Reason.ENGINE_MISSING


def test_an_installer_gets_the_indexes_and_nothing_else() -> None:
    environ = {
        "PATH": "/bin",
        "PIP_CONFIG_FILE": os.devnull,
        "PIP_INDEX_URL": "https://mirror.example/simple",
        "PIP_CERT": "/ca.pem",
        "PIP_FIND_LINKS": "/wheels  https://wheels.example",
        "UV_CACHE_DIR": "/cache",
        "HTTPS_PROXY": "http://proxy",
        "HF_TOKEN": "t",
        "TEMPORAL_API_KEY": "k",
    }
    assert install_environment(environ) == {
        "PATH": "/bin",
        "PIP_CONFIG_FILE": os.devnull,
        "PIP_INDEX_URL": "https://mirror.example/simple",
        "PIP_CERT": "/ca.pem",
        "PIP_FIND_LINKS": "/wheels  https://wheels.example",
        "UV_CACHE_DIR": "/cache",
        "HTTPS_PROXY": "http://proxy",
        "UV_FIND_LINKS": "/wheels,https://wheels.example",
        "UV_DEFAULT_INDEX": "https://mirror.example/simple",
        "SSL_CERT_FILE": "/ca.pem",
    }


PIP = {"PIP_INDEX_URL": "https://v", "PIP_EXTRA_INDEX_URL": "https://w"}
BEST = {"UV_INDEX_STRATEGY": "unsafe-best-match"}


@pytest.mark.parametrize(
    ("environ", "files", "made"),
    [
        ({}, {}, {}),
        (PIP, {}, {"UV_DEFAULT_INDEX": "https://v", "UV_INDEX": "https://w", **BEST}),
        ({**PIP, "UV_INDEX_URL": "https://own"}, {}, {"UV_INDEX": "https://w", **BEST}),
        ({**PIP, "UV_DEFAULT_INDEX": "https://own", "UV_EXTRA_INDEX_URL": "https://own"}, {}, {}),
        ({}, {".config/pip/pip.conf": "[global]\nindex-url = https://f\ncert = /ca.pem\n"},
         {"UV_DEFAULT_INDEX": "https://f", "SSL_CERT_FILE": "/ca.pem"}),
        (PIP, {".config/pip/pip.conf": "[global]\nindex-url = https://f\n"},
         {"UV_DEFAULT_INDEX": "https://v", "UV_INDEX": "https://w", **BEST}),
        ({}, {".pip/pip.conf": "[global]\nindex_url = https://old\n[install]\nfind-links =\n  /a\n  /b\n",
              ".config/pip/pip.conf": "[install]\nindex-url = https://f\nno-index = true\n"},
         {"UV_DEFAULT_INDEX": "https://f", "UV_FIND_LINKS": "/a,/b", "UV_NO_INDEX": "true"}),
        ({}, {".config/pip/pip.conf": "[global]\ntrusted-host = a b\ntimeout = 60\n[list]\nindex-url = https://l\n"},
         {"UV_INSECURE_HOST": "a b", "UV_HTTP_TIMEOUT": "60"}),
        ({"PIP_CONFIG_FILE": os.devnull}, {".config/pip/pip.conf": "[global]\nindex-url = https://f\n"}, {}),
        ({}, {".config/pip/pip.conf": "[global]\nindex-url = https://f\n", ".config/uv/uv.toml": ""}, {}),
    ],
)  # fmt: skip
def test_what_pip_is_set_up_for_reaches_uv(
    tmp_path: Path, environ: dict[str, str], files: dict[str, str], made: dict[str, str]
) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    found = as_uv_reads({"HOME": str(tmp_path), "XDG_CONFIG_DIRS": str(tmp_path / "none"), **environ})
    assert {name: value for name, value in found.items() if name not in of_this_machine() or name in made} == made


def of_this_machine() -> set[str]:
    """What its own /etc/pip.conf says, which no variable can hide."""
    return set(as_uv_reads({"XDG_CONFIG_DIRS": "/none"}))


def test_a_file_that_a_variable_names_stands_in_for_the_users_and_a_broken_one_is_said(tmp_path: Path) -> None:
    (tmp_path / ".pip").mkdir()
    (tmp_path / ".pip" / "pip.conf").write_text("[global]\nfind-links = /users\n")
    named = tmp_path / "named.conf"
    named.write_text("[global]\nindex-url = https://named\n")
    environ = {"HOME": str(tmp_path), "PIP_CONFIG_FILE": str(named)}
    found = as_uv_reads(environ)
    assert (found["UV_DEFAULT_INDEX"], found.get("UV_FIND_LINKS")) == ("https://named", None)
    named.write_text("index-url = https://named\n")
    with pytest.raises(StepError, match=r"pip's settings in .*named.conf cannot be read: ") as caught:
        install_environment(environ)
    assert caught.value.failure.reason is Reason.INSTALL_FAILED


@pytest.mark.parametrize(
    ("output", "line"),
    [
        ("Using CPython 3.11\n  × No solution found:\n  ╰─▶ Because x was not found\n\n      hint: try y\n",
         "Because x was not found"),
        ("Traceback:\nImportError: libx.so\n", "ImportError: libx.so"),
        ("", "it said nothing"),
    ],
)  # fmt: skip
def test_telling_line(output: str, line: str) -> None:
    assert telling_line(output) == line
