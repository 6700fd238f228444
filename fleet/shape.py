"""What decides a model's memory: its weights and, layer by layer, what it keeps of each token and of each request."""

from dataclasses import dataclass, replace

MAX_LAYERS = 4096
"""The deepest models have some 130; more is a damaged header."""


@dataclass(frozen=True)
class Layer:
    """What one layer keeps of a request, in numbers (not bytes)."""

    kv_heads: int = 0
    """0: it has no attention, or reuses another layer's."""
    key_dim: int = 0
    value_dim: int = 0
    window: int = 0
    """Tokens it looks back; 0: all."""
    state: int = 0
    """Of a recurrent layer: numbers of its state, however long the request."""
    latent: bool = False
    """Latent attention: one vector for all heads, which every GPU of a tensor-parallel group keeps whole."""

    @property
    def per_token(self) -> int:
        """Numbers kept of each token."""
        return self.kv_heads * (self.key_dim + self.value_dim)


@dataclass(frozen=True)
class Spread:
    """Which bytes of the weights belong to what, for a model whose layers are divided over stages."""

    layers: tuple[int, ...]
    """Of each layer."""
    embedding: int = 0
    """On the first stage."""
    head: int = 0
    """On the last one: what makes tokens of what the layers gave. The embedding once more where both are the same."""
    rest: int = 0
    """Of what is counted on every stage: norms, and whatever is not the language model."""


@dataclass(frozen=True)
class ModelShape:
    """A model's numbers. One that the weights do not tell is 0 and named in `missing`."""

    architecture: str
    weights_bytes: int
    """As the engine holds them: without what it does not load."""
    layers: tuple[Layer, ...] = ()
    heads: int = 0
    """Attention heads of a layer; tensor parallelism must divide them. 0: it has none."""
    embedding: int = 0
    feed_forward: int = 0
    vocabulary: int = 0
    context_length: int = 0
    """The longest the model was made for."""
    missing: tuple[str, ...] = ()
    spread: Spread | None = None
    """None where the names of its tensors do not tell, and for formats of engines that know no stages."""

    @property
    def per_token(self) -> int:
        """Numbers all layers keep of each token while no window is full."""
        return sum(layer.per_token for layer in self.layers)

    @property
    def state(self) -> int:
        """Numbers of all recurrent states of one request."""
        return sum(layer.state for layer in self.layers)


def checked(shape: ModelShape, *, unread: str = "", vocabulary: bool = True) -> ModelShape:
    """The shape with what it lacks named. `unread`: what it keeps in a way nobody here can count."""
    attends = [layer for layer in shape.layers if layer.kv_heads]
    known = {
        "architecture": bool(shape.architecture),
        "number of layers": bool(shape.layers),
        "number of KV heads": bool(attends) or bool(shape.state),
        "size of a head": all(layer.key_dim for layer in attends),
        "embedding length": shape.embedding > 0,
        "vocabulary": shape.vocabulary > 0 or not vocabulary,
        unread: not unread,
    }
    return replace(shape, missing=tuple(name for name, there in known.items() if not there))


def whole(value: object) -> int:
    """A count that can be believed, else 0: headers are hostile, and a million layers or heads do not exist."""
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 < value < 2**24 else 0
