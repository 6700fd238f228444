"""What a person calls a repo, as values: its reference, its name, and which of its files make up the model."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal
from urllib.parse import quote, unquote, urlsplit

from fleet.reasons import Reason, StepError
from fleet.spec import Format, ModelFile, ResolvedModel, safe_id

MAX_PATH = 1000
"""Characters of a file's path in a repo: well below what Linux takes (4096 bytes) once a directory stands before it."""

MAX_NAME = 180
"""Characters of a default name, so that it stays within `fleet.spec.ModelName` with a variant behind it."""

CONFIG_FILES = frozenset(
    {
        "1_Pooling/config.json",
        "added_tokens.json",
        "chat_template.jinja",
        "chat_template.json",
        "config.json",
        "generation_config.json",
        "merges.txt",
        "modules.json",
        "preprocessor_config.json",
        "processor_config.json",
        "sentence_bert_config.json",
        "special_tokens_map.json",
        "tekken.json",
        "tokenizer.json",
        "tokenizer.model",
        "tokenizer_config.json",
        "vocab.json",
        "vocab.txt",
    }
)
"""What an engine reads beside safetensors. Python files are left out, unless the model's code is to be trusted."""

INDEX = "model.safetensors.index.json"

_HUB_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}(/[A-Za-z0-9][A-Za-z0-9._-]{0,95})?")
_REVISION = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]{0,254}")
_VARIANT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_SHARD = re.compile(r"^(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf$", re.IGNORECASE)
_QUANT = re.compile(
    r"[.-](?P<variant>(?:UD-)?(?:I?Q\d+(?:_[A-Z0-9]+)*|TQ\d_\d|MXFP4(?:_MOE)?|BF16|F16|FP16|F32|FP32))$",
    re.IGNORECASE,
)

_PAGE = re.compile(
    r"^(?:https?://)?(?:www\.)?(?:huggingface\.co|hf\.co)/(?P<name>[^/?#]+/[^/?#]+)"
    r"(?:/(?:tree|blob)/(?P<revision>[^/?#]+).*|/?)$"
)
"""What a browser's address line says: its page, not a file (`/resolve/` names one)."""

Scheme = Literal["hf", "file", "https", "store"]

STORES = ("s3://", "gs://", "az://")
"""Object stores: a directory in one, or a GGUF."""


@dataclass(frozen=True)
class RepoRef:
    """A reference as a person typed it, taken apart."""

    scheme: Scheme
    location: str
    """`org/name`, an absolute path, or a URL."""
    revision: str = ""
    """Branch, tag or commit; empty: the default one. Only for `hf`."""
    variant: str = ""
    """Which GGUF of several, such as `Q4_K_M`; empty: the only one."""

    @property
    def repo(self) -> str:
        """The reference without revision and variant, as `ResolvedModel.repo` keeps it."""
        return self.location if self.scheme in ("https", "store") else f"{self.scheme}:{self.location}"


@dataclass(frozen=True)
class Choice:
    """The files that make up one model."""

    format: Format
    entry: str
    """The GGUF or its first shard; empty for safetensors, where an engine is pointed at the directory."""
    files: tuple[ModelFile, ...]


def parse_repo(text: str) -> RepoRef:
    """Take a reference apart: `hf:org/name@rev`, `org/name:Q4_K_M`, `file:/path`, `/path`, `https://host/x.gguf`.

    Revision and variant may stand together as `org/name@rev:Q4_K_M`. Raises StepError(BAD_INPUT).
    """
    text = text.strip()
    if not text or not text.isprintable():
        raise _bad_repo(text, "is empty or holds control characters")
    scheme, colon, rest = text.partition(":")
    page = _PAGE.match(text)
    if page:
        name = page["name"] + (f"@{page['revision']}" if page["revision"] else "")
        quant = _QUANT.search(_stem(text)) if text.lower().endswith(".gguf") else None
        variant = f":{quant['variant']}" if quant else ""
        raise _bad_repo(text, f"is a page of the hub: write {name}{variant}")
    if text.startswith("/"):
        return _file(text, text)
    if colon and scheme == "file":
        return _file(text, _path_of(text))
    if text.startswith(STORES):
        return _store(text)
    if colon and scheme in ("https", "http"):
        return _url(text)
    return _hub(text, rest if colon and scheme == "hf" else text)


def default_name(ref: RepoRef) -> str:
    """The name a model gets where nobody gave one: the last part of its location, lower case.

    A GGUF's extension, shard number and quantization are left out; a variant that was asked for is appended.
    """
    if ref.scheme == "hf":
        name = ref.location.rpartition("/")[2]
        name = re.sub(r"-gguf$", "", name, flags=re.IGNORECASE)
    else:
        path = urlsplit(ref.location).path if ref.scheme in ("https", "store") else ref.location
        name = unquote(path.rstrip("/").rpartition("/")[2]) if ref.scheme == "https" else path.rpartition("/")[2]
        name = _QUANT.sub("", _stem(name))
    name = name[:MAX_NAME].lower() or "model"
    return f"{name}-{ref.variant.lower()}" if ref.variant else name


def weights_id(resolved: ResolvedModel) -> str:
    """The name of the directory that holds these bytes, on the mirror and on every node: `[a-z0-9-]` only.

    A repo that serves several variants has one directory for each: the entry is part of the name.
    """
    name = resolved.repo if not resolved.entry else f"{resolved.repo}/{resolved.entry}"
    if any(_is_code(file) for file in resolved.files):
        name += "/code"  # the same weights with the repo's code beside them are another directory
    return f"{safe_id(name)}-{safe_id(resolved.revision[:12])}"


def choose_files(
    files: Sequence[ModelFile], variant: str = "", format: Format | None = None, *, code: bool = False
) -> Choice:
    """Pick one set of weights: safetensors where there are any, else one GGUF. Pickled weights are never taken.

    `format`: that one alone, as an engine reads it. `code`: the Python files beside safetensors come along.

    Raises StepError(NO_WEIGHTS) with what there is instead.
    """
    ggufs = _gguf_variants(files)
    tensors = [file for file in files if file.path.endswith(".safetensors") and "/" not in file.path]
    if variant:
        return _gguf_choice(ggufs, _match(ggufs, variant))
    if format is Format.SAFETENSORS and not tensors and ggufs:
        raise StepError(Reason.NO_WEIGHTS, f"there are no safetensors, only GGUF: {_list(ggufs)}")
    if format is Format.GGUF and tensors and not ggufs:
        raise StepError(Reason.NO_WEIGHTS, f"there is no GGUF, only {len(tensors)} safetensors files")
    if tensors and format is not Format.GGUF:
        return _safetensors_choice(files, tensors, code=code)
    if len(ggufs) == 1:
        return _gguf_choice(ggufs, next(iter(ggufs)))
    if ggufs:
        example = min(ggufs, key=len)
        raise StepError(
            Reason.NO_WEIGHTS,
            f"{len(ggufs)} GGUF variants are there: name one (`repo:{example}`, or the file itself): {_list(ggufs)}",
        )
    pickled = [file.path for file in files if file.path.endswith((".bin", ".pt", ".pth"))]
    detail = f"has only pickled weights, which can run code ({_list(pickled)})" if pickled else _files(files)
    raise StepError(Reason.NO_WEIGHTS, f"no GGUF and no safetensors: it {detail}")


def _files(files: Sequence[ModelFile]) -> str:
    if not files:
        return "is empty"
    return f"has {len(files)} other file{'s' if len(files) != 1 else ''}, such as {files[0].path}"


def shards_beside(name: str, others: Iterable[str]) -> list[str]:
    """The files that belong to the one named: all shards of its set, or itself alone."""
    shard = _SHARD.match(name)
    if not shard:
        return [name]
    wanted = (shard["stem"], shard["count"])
    return sorted(
        other for other in others if (found := _SHARD.match(other)) and (found["stem"], found["count"]) == wanted
    )


def check_path(path: str) -> None:
    """Refuse a path that could leave the directory it is put in. Raises StepError(BAD_INPUT)."""
    wrong = ""
    if not path:
        wrong = "is empty"
    elif len(path) > MAX_PATH:
        wrong = f"has more than {MAX_PATH} characters"
    elif not path.isprintable():
        wrong = "holds control characters"
    elif "\\" in path:
        wrong = "holds a backslash"
    elif path.startswith("/"):
        wrong = "is absolute"
    elif any(part in ("", ".", "..") for part in path.split("/")):
        wrong = "has an empty part, `.` or `..`"
    elif any(len(part.encode(errors="replace")) > 240 for part in path.split("/")):
        wrong = "has a part of more than 240 bytes"
    if wrong:
        raise StepError(Reason.BAD_INPUT, f"file path {path[:80]!r} {wrong}")


def check_paths(paths: Iterable[str]) -> None:
    """Refuse hostile paths, and sets of paths that cannot exist beside each other. Raises StepError(BAD_INPUT)."""
    seen: set[str] = set()
    parents: set[str] = set()
    for path in paths:
        check_path(path)
        if path in seen:
            raise StepError(Reason.BAD_INPUT, f"file path {path!r} is listed twice")
        seen.add(path)
        parts = path.split("/")
        parents.update("/".join(parts[:end]) for end in range(1, len(parts)))
    both = seen & parents
    if both:
        raise StepError(Reason.BAD_INPUT, f"file path {min(both)!r} is a file and a directory")


def file_url(base: str, path: str) -> str:
    """The URL of a file beneath a directory's URL, such as `Weights.mirror`; quoted as URLs are."""
    return f"{base.rstrip('/')}/{quote(path)}"


def path_of_url(url: str) -> str:
    """The absolute path in a `file:` URL. Raises StepError(BAD_INPUT)."""
    if not url.startswith("file:"):
        raise StepError(Reason.BAD_INPUT, f"{url[:200]!r} is not a file: URL")
    return unquote(_path_of(url))


def _path_of(text: str) -> str:
    path = text.removeprefix("file:")
    if path.startswith("//"):
        path = path[2:].removeprefix("localhost")
    if not path.startswith("/"):
        raise _bad_repo(text, "does not name an absolute path; write file:/path/to/model")
    return path


def _file(text: str, path: str) -> RepoRef:
    """A path as it stands: a person types `%` for itself, so nothing is unquoted here."""
    parts = [part for part in path.split("/") if part not in ("", ".")]
    if not parts or ".." in parts:
        raise _bad_repo(text, "must name a file or a directory, without `..`")
    return RepoRef("file", "/" + "/".join(parts))


def _url(text: str) -> RepoRef:
    try:
        parts = urlsplit(text)
        host, _ = parts.hostname, parts.port
    except ValueError as error:
        raise _bad_repo(text, f"is not a URL: {error}") from error
    if not host or parts.username is not None or parts.password is not None:
        raise _bad_repo(text.partition("@")[2] or text, "must name a host and no credentials")
    if not parts.path.lower().endswith(".gguf"):
        raise _bad_repo(text, "must name one .gguf file; a repo on the hub is written org/name")
    return RepoRef("https", parts._replace(fragment="").geturl())


def _store(text: str) -> RepoRef:
    parts = urlsplit(text)
    if parts.username is not None or parts.password is not None or parts.query or parts.fragment:
        raise _bad_repo(
            text.rpartition("@")[2].partition("?")[0], "must hold no credentials: they are the worker's own"
        )
    names = [part for part in parts.path.split("/") if part]
    if not parts.netloc or not names or ".." in names or "." in names:
        raise _bad_repo(text, "must name a bucket and a directory or GGUF in it, such as s3://bucket/models/m")
    return RepoRef("store", f"{parts.scheme}://{parts.netloc}/{'/'.join(names)}")


def _hub(text: str, rest: str) -> RepoRef:
    hint = _hint(text)
    if hint:
        raise _bad_repo(text, hint)
    rest, colon, variant = rest.partition(":")
    name, at, revision = rest.partition("@")
    if "://" in text or not _HUB_NAME.fullmatch(name) or ".." in name or "--" in name:
        raise _bad_repo(text, "is no repo: write org/name, hf:org/name@revision, file:/path or https://host/x.gguf")
    if at and (not _REVISION.fullmatch(revision) or ".." in revision):
        raise _bad_repo(text, "has a revision that is not a branch, a tag or a commit")
    if colon and not _VARIANT.fullmatch(variant):
        raise _bad_repo(text, "has a variant that is not a name such as Q4_K_M")
    return RepoRef("hf", name, revision, variant)


def _hint(text: str) -> str:
    """What is wrong with a reference that looks like another tool's or another system's; empty for any other."""
    if "\\" in text:
        return "holds a backslash: write a path as file:/path/to/model, and a repo as org/name"
    if text.startswith("hf://"):
        return f"has two slashes too many: write hf:{text.removeprefix('hf://')}"
    store = next((scheme for scheme in STORES if text.startswith(scheme.removesuffix("//"))), "")
    if store and "/" in text:
        return f"is no address: write {store}{text.removeprefix(store.removesuffix('//'))}"
    scheme = "hf:" if text.startswith("hf:") else ""
    turned = re.fullmatch(r"([^:@]+)(:[^:@]+)(@[^:@]+)", text.removeprefix(scheme))
    return f"has its revision behind its variant: write {scheme}{turned[1]}{turned[3]}{turned[2]}" if turned else ""


def _bad_repo(text: str, wrong: str) -> StepError:
    return StepError(Reason.BAD_INPUT, f"repo {text[:200]!r} {wrong}")


def _stem(name: str) -> str:
    shard = _SHARD.match(name)
    if shard:
        return shard["stem"]
    return name[: -len(".gguf")] if name.lower().endswith(".gguf") else name


def _gguf_variants(files: Sequence[ModelFile]) -> dict[str, list[ModelFile]]:
    """GGUF files by variant: the quantization where names differ by it alone, else the name without extension."""
    by_stem: dict[str, list[ModelFile]] = {}
    for file in files:
        directory, _, name = file.path.rpartition("/")
        # A projector is a part that goes with a model, never a model.
        if name.lower().endswith(".gguf") and not name.lower().startswith("mmproj"):
            by_stem.setdefault(f"{directory}/{_stem(name)}".lstrip("/"), []).append(file)
    short = {stem: _quant(stem) for stem in by_stem}
    clear = len(set(short.values())) == len(short)
    return {(short[stem] if clear else stem): by_stem[stem] for stem in sorted(by_stem)}


def variant_of(entry: str) -> str:
    """The variant by which a GGUF is asked for, where it is the only one of its quantization: `Q4_K_M`."""
    return _quant(_stem(entry.rpartition("/")[2]))


def _quant(stem: str) -> str:
    found = _QUANT.search(stem)
    return found["variant"].upper() if found else stem


def _match(ggufs: dict[str, list[ModelFile]], variant: str) -> str:
    wanted = variant.lower()
    found = [name for name in ggufs if name.lower() == wanted]
    found = found or [name for name in ggufs if re.search(rf"(^|[./_-]){re.escape(wanted)}$", name.lower())]
    if len(found) == 1:
        return found[0]
    if found:
        raise StepError(Reason.NO_WEIGHTS, f"variant {variant} is not one of them but several: {_list(found)}")
    raise StepError(Reason.NO_WEIGHTS, f"no GGUF variant {variant} is there; there are: {_list(ggufs)}")


def _gguf_choice(ggufs: dict[str, list[ModelFile]], name: str) -> Choice:
    parts = sorted(ggufs[name], key=lambda file: file.path)
    first = _SHARD.match(parts[0].path)
    wanted = int(first["count"]) if first else 1
    numbers = [int(shard["number"]) for file in parts if (shard := _SHARD.match(file.path))]
    if first and numbers != list(range(1, wanted + 1)):
        raise StepError(Reason.NO_WEIGHTS, f"{name}: {len(numbers)} of {wanted} shards are there")
    return Choice(Format.GGUF, parts[0].path, tuple(parts) if first else (parts[0],))


def _is_code(file: ModelFile) -> bool:
    return file.path.endswith(".py") and "/" not in file.path


def _safetensors_choice(files: Sequence[ModelFile], tensors: list[ModelFile], *, code: bool) -> Choice:
    # Where an index is there, the shards it lists are the model; a consolidated copy beside them is the same bytes.
    sharded = [file for file in tensors if re.search(r"-\d{5}-of-\d{5}\.safetensors$", file.path)]
    plain = [file for file in tensors if file.path == "model.safetensors"]
    beside = [file for file in files if file.path in CONFIG_FILES or file.path == INDEX or (code and _is_code(file))]
    if not any(file.path == "config.json" for file in beside):
        raise StepError(Reason.NO_WEIGHTS, "safetensors are there, but no config.json that says what they are")
    chosen = plain or sharded or tensors
    if chosen is not sharded:
        beside = [file for file in beside if file.path != INDEX]
    return Choice(Format.SAFETENSORS, "", tuple(sorted([*chosen, *beside], key=lambda file: file.path)))


def _list(names: Iterable[str]) -> str:
    ordered = sorted(names)
    return ", ".join(ordered[:12]) + (f" and {len(ordered) - 12} more" if len(ordered) > 12 else "")
