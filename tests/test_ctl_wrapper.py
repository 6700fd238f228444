"""The `ctl` wrapper in a copy of the checkout: a real pip and a real uv, with locks that hold almost nothing."""

import asyncio
import hashlib
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from cli.bootstrap import index_environment
from tests.test_install import wheel

ROOT = Path(__file__).resolve().parent.parent

SHOW = """
import os, sys
import cli
print(sys.argv[1:], os.getcwd(), cli.__file__, sys.prefix, os.environ.get("PYTHONSAFEPATH"))
"""
TOOLS = ("sh", "dirname", "readlink", "cksum", "env")


@dataclass(frozen=True)
class Checkout:
    root: Path

    def run(
        self, *arguments: str, ctl: Path | None = None, cwd: Path | None = None, **more: str
    ) -> tuple[int, str, str]:
        environment = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "VIRTUAL_ENV")}
        done = subprocess.run(
            [str(ctl or self.root / "ctl"), *arguments],
            cwd=cwd or self.root,
            env={**environment, "LLMGW_PYTHON": sys.executable if _has_pip(sys.executable) else "", **more},
            capture_output=True,
            text=True,
            check=False,
        )
        return done.returncode, done.stdout, done.stderr


def _has_pip(python: str) -> bool:
    return subprocess.run([python, "-c", "import pip"], capture_output=True, check=False).returncode == 0


def make_checkout(root: Path) -> Checkout:
    (root / "cli").mkdir(parents=True)
    (root / "requirements").mkdir()
    shutil.copy2(ROOT / "ctl", root / "ctl")
    for name in ("__init__.py", "bootstrap.py"):
        shutil.copy2(ROOT / "cli" / name, root / "cli" / name)
    (root / "cli" / "__main__.py").write_text(SHOW)
    shutil.copy2(ROOT / "requirements" / "uv.txt", root / "requirements" / "uv.txt")
    (root / "requirements" / "runtime.txt").write_text("# nothing\n")
    (root / "requirements" / "dev.txt").write_text("# nothing, for tests\n")
    return Checkout(root)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Checkout:
    """A checkout whose path has a space, with its `.venv` made."""
    checkout = make_checkout(tmp_path_factory.mktemp("wrapper") / "a checkout")
    code, _, err = checkout.run("first")
    assert (code, err) == (0, "ctl: setting up .venv from requirements/runtime.txt\n")
    return checkout


def _changed(made: Checkout) -> dict[Path, int]:
    """When each file of its environment was changed last."""
    files = (path for path in (made.root / ".venv").rglob("*") if "__pycache__" not in path.parts)
    return {path: path.stat().st_mtime_ns for path in files}


def test_a_second_run_adds_nothing(made: Checkout) -> None:
    before = _changed(made)
    code, out, err = made.run("model", "serve", "a b", "--name=x y", PYTHONSAFEPATH="1", PYTHONHOME="")
    assert (code, err) == (0, "")
    assert out == (
        f"['model', 'serve', 'a b', '--name=x y'] {made.root} {made.root}/cli/__init__.py {made.root}/.venv None\n"
    )
    after = _changed(made)
    assert after == before


def test_through_a_link_from_a_directory_that_has_a_cli_of_its_own(made: Checkout, tmp_path: Path) -> None:
    (tmp_path / "cli.py").write_text("raise SystemExit('the wrong cli')")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "ctl").symlink_to(made.root / "ctl")
    (tmp_path / "llmgw").symlink_to("bin/ctl")
    code, out, err = made.run("x", ctl=tmp_path / "llmgw", cwd=tmp_path, CDPATH="/")
    assert (code, err) == (0, "")
    assert out.startswith(f"['x'] {tmp_path} {made.root}/cli/")


def test_a_changed_lock_is_taken_and_tests_have_a_lock_of_their_own(made: Checkout) -> None:
    (made.root / "requirements" / "runtime.txt").write_text("# still nothing\n")
    assert made.run("x")[2] == "ctl: setting up .venv from requirements/runtime.txt\n"
    assert made.run("x")[2] == ""
    assert made.run("test")[2] == "ctl: setting up .venv from requirements/dev.txt\n"
    # What tests need holds all that the rest needs.
    assert made.run("x")[2] == ""
    assert made.run("test")[2] == ""
    # A developer's environment stays one, whatever is run first after a change.
    (made.root / "requirements" / "dev.txt").write_text("# nothing, for other tests\n")
    assert made.run("x")[2] == "ctl: setting up .venv from requirements/dev.txt\n"
    assert made.run("test")[2] == ""


def test_the_help_of_test_installs_nothing(tmp_path: Path, made: Checkout) -> None:
    other = Checkout(tmp_path / "other")
    shutil.copytree(made.root, other.root, symlinks=True)
    (other.root / ".venv" / "llmgw-stamp").unlink()
    assert other.run("x")[2] == "ctl: setting up .venv from requirements/runtime.txt\n"
    code, out, err = other.run("test", "--help")
    assert (code, out.partition("]")[0], err) == (0, "['test', '--help'", "")


def test_its_own_environment_on_the_path_is_not_what_it_is_made_with(made: Checkout) -> None:
    (made.root / "requirements" / "runtime.txt").write_text("# and nothing again\n")
    (made.root / "requirements" / "dev.txt").write_text("# and nothing again\n")
    own = made.root / ".venv" / "bin"
    for named in ("", str(own / "python")):
        (made.root / ".venv" / "llmgw-stamp").unlink()
        code, _, err = made.run("x", PATH=f"{own}:{os.environ['PATH']}", LLMGW_PYTHON=named)
        assert (code, err) == (0, "ctl: setting up .venv from requirements/runtime.txt\n")


def test_an_environment_that_broke_is_made_anew(made: Checkout) -> None:
    python = made.root / ".venv" / "bin" / "python"
    python.unlink()
    python.symlink_to("/no/such/python")
    code, out, err = made.run("x")
    assert (code, err) == (0, "ctl: setting up .venv from requirements/runtime.txt\n")
    assert out.startswith("['x']")


def test_a_lock_that_cannot_be_met_is_a_sentence_with_the_cause(made: Checkout) -> None:
    lock = made.root / "requirements" / "runtime.txt"
    before = lock.read_text()
    lock.write_text("a-package-without-a-hash==1\n")
    try:
        code, out, err = made.run("x")
    finally:
        lock.write_text(before)
    assert (code, out) == (1, "")
    assert "ctl: .venv could not be set up: " in err
    assert "--require-hashes" in err
    assert "a-package-without-a-hash" in err
    assert "Traceback" not in err
    assert made.run("x")[0] == 0


async def test_first_runs_at_the_same_time_do_the_work_once(made: Checkout) -> None:
    shutil.rmtree(made.root / ".venv")
    runs = await asyncio.gather(*(asyncio.to_thread(made.run, f"run {number}") for number in range(3)))
    assert [code for code, _, _ in runs] == [0, 0, 0]
    assert sorted(out.partition("]")[0] for _, out, _ in runs) == [f"['run {number}'" for number in range(3)]
    setups = [line for _, _, err in runs for line in err.splitlines() if "setting up" in line and "waiting" not in line]
    assert setups == ["ctl: setting up .venv from requirements/runtime.txt"]


def only(directory: Path, **scripts: str) -> str:
    """A PATH with the tools the wrapper uses, and these scripts."""
    directory.mkdir()
    for tool in TOOLS:
        (directory / tool).symlink_to(shutil.which(tool) or "")
    for name, text in scripts.items():
        (directory / name).write_text(text)
        (directory / name).chmod(0o755)
    return str(directory)


def test_without_python_it_says_so(tmp_path: Path) -> None:
    fresh = make_checkout(tmp_path / "checkout")
    old = "#!/bin/sh\nexit 1\n"
    code, out, err = fresh.run("x", PATH=only(tmp_path / "bin", python3=old), LLMGW_PYTHON="")
    assert (code, out) == (1, "")
    assert err == "ctl: no Python 3.11 or later was found: install one, or name it in LLMGW_PYTHON\n"
    assert not (fresh.root / ".venv").exists()


def test_without_pip_it_says_so(tmp_path: Path) -> None:
    fresh = make_checkout(tmp_path / "checkout")
    bare = f'#!/bin/sh\nexec "{sys.executable}" -I -S "$@"\n'  # no site-packages, so no pip
    code, out, err = fresh.run("x", PATH=only(tmp_path / "bin", python3=bare), LLMGW_PYTHON="")
    assert (code, out) == (1, "")
    assert err.startswith(f"ctl: {tmp_path}/bin/python3 has no pip: install it")


def test_it_is_made_from_what_pips_files_name(made: Checkout, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without an index, from a directory that nothing but the file names."""
    built = wheel(tmp_path / "wheels", "1.0")
    file = tmp_path / "pip.conf"
    file.write_text(f"[global]\nno-index = true\n[install]\nfind_links =\n    {tmp_path}\n    {built.parent}\n")
    other = Checkout(tmp_path / "other")
    shutil.copytree(made.root, other.root, symlinks=True)
    digest = hashlib.sha256(built.read_bytes()).hexdigest()
    (other.root / "requirements" / "runtime.txt").write_text(f"tinyengine==1.0 --hash=sha256:{digest}\n")
    for name in ("PIP_FIND_LINKS", "PIP_NO_INDEX", "UV_FIND_LINKS", "UV_NO_INDEX", "UV_DEFAULT_INDEX"):
        monkeypatch.delenv(name, raising=False)
    code, _, err = other.run("x", PIP_CONFIG_FILE=str(file), UV_CACHE_DIR=str(tmp_path / "cache"))
    assert (code, err) == (0, "ctl: setting up .venv from requirements/runtime.txt\n")
    assert list((other.root / ".venv").glob("lib/python*/site-packages/tinyengine.py"))


def test_a_file_of_pips_that_cannot_be_read_is_said(made: Checkout, tmp_path: Path) -> None:
    file = tmp_path / "pip.conf"
    file.write_text("index-url = https://named\n")
    other = Checkout(tmp_path / "other")
    shutil.copytree(made.root, other.root, symlinks=True)
    (other.root / ".venv" / "llmgw-stamp").unlink()
    code, out, err = other.run("x", PIP_CONFIG_FILE=str(file))
    assert (code, out) == (1, "")
    assert str(file) in err
    assert "Traceback" not in err


A, B, UV = "https://a.example", "https://b.example", "https://uv.example"
BEST = {"UV_INDEX_STRATEGY": "unsafe-best-match"}


@pytest.mark.parametrize(
    ("environment", "configured", "expected"),
    [
        ({}, "", {}),
        ({}, f"global.index-url='{A}'", {"UV_DEFAULT_INDEX": A}),
        ({}, f":env:.index-url='{A}'\nglobal.index-url='{B}'", {"UV_DEFAULT_INDEX": A}),
        ({}, f"global.index-url='{A}'\ninstall.index_url='{B}'\nlist.index-url='{UV}'", {"UV_DEFAULT_INDEX": B}),
        ({}, f":env:.index-url=''\nglobal.index-url='{B}'", {"UV_DEFAULT_INDEX": B}),
        ({"UV_INDEX_URL": UV}, f"global.index-url='{B}'", {}),
        ({}, f"global.extra-index-url='{A}\\n{B}'", {"UV_INDEX": f"{A} {B}", **BEST}),
        ({"UV_INDEX": UV}, f"global.index-url='{A}'\nglobal.extra-index-url='{B}'", {"UV_DEFAULT_INDEX": A}),
        ({"UV_INDEX_STRATEGY": "first-index"}, f"global.extra-index-url='{A}'", {"UV_INDEX": A}),
        ({}, "global.find-links='/a /b'\nglobal.no-index='true'", {"UV_FIND_LINKS": "/a,/b", "UV_NO_INDEX": "true"}),
        ({}, "global.trusted-host='a b'\nglobal.timeout='60'", {"UV_INSECURE_HOST": "a b", "UV_HTTP_TIMEOUT": "60"}),
        ({}, "global.constraint='/c.txt'\nglobal.quiet='1'", {}),
        ({}, "global.cert='/ca.pem'", {"SSL_CERT_FILE": "/ca.pem"}),
        ({"SSL_CERT_FILE": "/own.pem"}, ":env:.cert='/ca.pem'", {}),
    ],
)
def test_uv_gets_what_pip_is_set_up_for(environment: dict[str, str], configured: str, expected: dict[str, str]) -> None:
    assert index_environment(environment, configured) == {**environment, **expected}
