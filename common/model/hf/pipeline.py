"""Runs a part of the layers of a transformers model: a pipeline stage.

The class's own code runs on every stage, so that it makes masks and rotations as usual. Layers of
other stages return their input, the first layer of a stage takes the hidden states of the stage
before, and an inner stage ends the run after its last layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from weakref import WeakSet

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from pdserve.common.core.errors import ConfigError
from pdserve.common.core.kv_groups import LayerKV
from pdserve.common.model.hf.adapt import layers_of
from pdserve.common.model.hf.positions import takes_positions
from pdserve.common.model.stages import Stage


def decoder_layers(model: Any, count: int) -> tuple[str, nn.ModuleList]:
    """Returns the name of the model's list of decoder layers, and the list. It has `count` layers,
    or half as many if each layer counts as two (two attentions, or a state). Raises ConfigError."""
    lists = [each for each in model.named_modules() if isinstance(each[1], nn.ModuleList)]
    found = [(name, each) for name, each in lists if len(each) == count]
    found = found or [(name, each) for name, each in lists if 2 * len(each) == count]
    if not found:
        raise ConfigError(f"{type(model).__name__} has no list of {count} layers to be split")
    return min(found, key=lambda each: each[0].count("."))


def check_stage(name: str, kept: Sequence[LayerKV | int], stage: Stage) -> None:
    """Raises ConfigError if a layer of the stage attends to the KV of another stage."""
    for layer in range(stage.start, stage.end):
        owner = kept[layer]
        if isinstance(owner, int) and not stage.start <= owner < stage.end:
            raise ConfigError(
                f"{name}: layer {layer} attends to the KV of layer {owner}, and "
                "--pipeline-parallel-size and --pipeline-partition put it into another stage"
            )


FORGOTTEN = WeakSet[nn.Module]()  # modules without their parameters


class Watch:
    """Checks on the meta device whether layers pass on nothing but hidden states."""

    def __init__(self, model: Any, layers: nn.ModuleList, hidden_size: int) -> None:
        self.tuples = 0  # the length of the tuple that layers return; 0: a tensor
        self.reason = ""
        self._hidden_size = hidden_size
        model.requires_grad_(False)
        for module in model.modules():
            if isinstance(module, nn.Embedding):
                module.register_forward_hook(lambda _, __, out: out.detach().requires_grad_() + 0)
        for layer in layers:
            layer.register_forward_pre_hook(self._before, with_kwargs=True)
            layer.register_forward_hook(self._after)

    def _before(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not args and "hidden_states" not in kwargs:
            self.reason = "its layers do not take hidden states"
            return
        hidden = args[0] if args else kwargs["hidden_states"]
        if hidden.ndim != 3 or hidden.shape[2] != self._hidden_size:
            self.reason = "its hidden states are not one vector of the embedding's size a token"
        others = {k: v for k, v in kwargs.items() if args or k != "hidden_states"}
        for each in tree_leaves((args[1:], others)):
            if isinstance(each, Tensor) and each.requires_grad:
                self.reason = "its layers need more than the output of the one before"

    def _after(self, layer: nn.Module, args: Any, output: Any) -> None:
        self.tuples = len(output) if isinstance(output, tuple | list) else 0


class _Ended(Exception):
    """The stage's last layer has run."""

    def __init__(self, hidden: Tensor) -> None:
        super().__init__()
        self.hidden = hidden


class StageRun:
    """The layers of a stage; `inputs` are read by its first one."""

    def __init__(self, model: Any, layers: Sequence[Any], stage: Stage, tuples: int) -> None:
        self._stage, self._tuples = stage, tuples
        self._positions = takes_positions(layers_of(model)[1])
        self._inputs: Tensor | None = None
        for index, layer in enumerate(layers):
            if not stage.start <= index < stage.end:
                _forget(layer)
                layer.forward = self._pass_on
        if not stage.first:
            layers[stage.start].register_forward_pre_hook(self._enter, with_kwargs=True)
        if not stage.last:
            layers[stage.end - 1].register_forward_hook(self._leave)
        if not (stage.first and stage.last):
            self._drop_ends(model, bool(model.config.get_text_config().tie_word_embeddings))

    def _drop_ends(self, model: Any, tied: bool) -> None:
        """Drops the parameters of embedding and head if the stage does not need them."""
        embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
        self.embedding_size = embedding.weight.shape[1]
        if not self._stage.first and not (tied and self._stage.last):
            _forget(embedding)
        if not self._stage.last:
            if head is not None:
                _forget(head)
            model.all_tied_weights_keys = {}

    def forward(self, base: nn.Module, inputs: Tensor, positions: Tensor) -> Tensor:
        """Runs the stage: token ids `[T]`, or hidden states of the stage before → `[T, hidden]`."""
        if self._stage.first:
            given = {"input_ids": inputs[None]}
        else:
            self._inputs = inputs[None]
            given = {"inputs_embeds": inputs.new_zeros(1, len(inputs), self.embedding_size)}
        if self._positions:
            given["position_ids"] = positions[None]
        try:
            output = base(**given, use_cache=False)
        except _Ended as ended:
            return ended.hidden[0]
        finally:
            self._inputs = None
        hidden: Tensor = output[0][0]
        return hidden

    def _pass_on(self, *args: Any, **kwargs: Any) -> Any:
        hidden = args[0] if args else kwargs["hidden_states"]
        return (hidden, *[None] * (self._tuples - 1)) if self._tuples else hidden

    def _enter(
        self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if args:
            return (self._inputs, *args[1:]), kwargs
        return args, {**kwargs, "hidden_states": self._inputs}

    def _leave(self, _: nn.Module, __: Any, output: Any) -> None:
        raise _Ended(output[0] if self._tuples else output)


def _forget(module: nn.Module) -> None:
    """Drops the parameters of a module that never runs."""
    FORGOTTEN.add(module)
    for each in module.modules():
        each._is_hf_initialized = True  # type: ignore[assignment]  # transformers shall not
        for name in each._parameters:
            each._parameters[name] = None
