"""Computes steps of a transformers class: with its own code, or with a recorded graph."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.fx import Graph

from pdserve.common.model.hf.adapt import layers_of
from pdserve.common.model.hf.attention import Answers, answering
from pdserve.common.model.hf.calls import Norm, PackedCall
from pdserve.common.model.hf.experts import Experts, experts_of
from pdserve.common.model.hf.fusions import Groups, Products, fuse, norms_of
from pdserve.common.model.hf.linears import let_adapt
from pdserve.common.model.hf.packed import packed_linears
from pdserve.common.model.hf.pipeline import StageRun
from pdserve.common.model.hf.program import Program
from pdserve.common.model.hf.trace import (
    COUNTS,
    META,
    Attend,
    Named,
    RecordedAnswers,
    Recorder,
    merged,
    on_meta,
    recording,
)
from pdserve.common.model.kernels.ops import Kernels
from pdserve.common.model.stages import Stage


class Steps(Protocol):
    """Computes the steps of a stage."""

    @property
    def adapted(self) -> Groups:
        """The linear layers that may have LoRA adapters; those fused into one product together."""

    def forward(self, inputs: Tensor, positions: Tensor, step: Answers) -> Tensor:
        """Takes token ids `[T]`, or hidden states of the stage before, and positions `[T]`; returns
        `[T, hidden]`. `step` computes attention."""

    def logits(self, hidden: Tensor) -> Tensor:
        """Returns `[B, vocabulary]`, which may be padded, of `[B, hidden]`."""


class ClassSteps:
    """Computes steps with the class's own code."""

    def __init__(self, model: Any, adapted: Mapping[str, nn.Module]) -> None:
        """`adapted`: the linear layers that may have LoRA adapters, by name."""
        self.model = model
        self.adapted: Groups = [(name,) for name in adapted]
        let_adapt(adapted)
        name, self._base = layers_of(model)
        self._run: StageRun = model.stage_run
        self._given, self._head = _Given(self._base), copy.copy(model)
        self._head._modules = {**model._modules, name: self._given}

    def forward(self, inputs: Tensor, positions: Tensor, step: Answers) -> Tensor:
        with answering(step):
            return self._run.forward(self._base, inputs, positions)

    def logits(self, hidden: Tensor) -> Tensor:
        self._given.hidden = hidden[None]
        found: Tensor = self._head(input_ids=None, inputs_embeds=hidden[None]).logits[0]
        return found


@dataclass(frozen=True)
class _Output:
    """The output of a class's layers; all other attributes are None."""

    last_hidden_state: Tensor

    def __getitem__(self, index: int) -> Tensor:
        return (self.last_hidden_state,)[index]

    def __getattr__(self, name: str) -> None:
        return None


class _Given(nn.Module):
    """Stands for the layers `base` when the head runs alone; returns a given output."""

    hidden: Tensor

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.__dict__["base"] = base  # not as a submodule

    def __getattr__(self, name: str) -> Any:  # heads may read attributes of the layers (Falcon-H1)
        return getattr(self.__dict__["base"], name)

    @property
    def decoder(self) -> _Given:  # OPT calls `model.decoder`
        return self

    def forward(self, *_: Any, **__: Any) -> _Output:
        return _Output(self.hidden)


@dataclass(frozen=True, slots=True)
class GraphSteps:
    """Computes steps with recorded graphs."""

    body: Program
    head: Program | None  # None: the stage has none
    adapted: Groups
    products: Products
    experts: Sequence[Experts]

    def forward(self, inputs: Tensor, positions: Tensor, step: Answers) -> Tensor:
        return self.body(inputs, positions, step)

    def logits(self, hidden: Tensor) -> Tensor:
        assert self.head is not None, "only the last stage has a head"
        return self.head(hidden)


class Recorded:
    """The graphs of a stage's steps, and how its layers attend: q, k, v on the meta device."""

    def __init__(self, steps: ClassSteps, stage: Stage, size: int, kernels: Kernels) -> None:
        """`size`: of an inner stage's inputs. Raises whatever errors the class's code raises."""
        self._steps, self._stage, self._size, self._kernels = steps, stage, size, kernels
        self._tensors: dict[str, Tensor] = {}
        self._device = steps.model.device
        experts = {each: Experts(name, each) for name, each in experts_of(steps.model).items()}
        self._experts = tuple(experts.values())
        calls: dict[nn.Module, Callable[..., Tensor]] = {**experts}
        calls.update(norms_of(steps.model, kernels))
        calls.update((each, PackedCall(name, each)) for name, each in packed_linears(steps.model))
        with on_meta(steps.model) as named:
            self._body = self._graph(named, calls, self._run_body)
            output = next(reversed(self._body.nodes)).args[0]
            self._size = output.meta["shape"][-1]  # may differ from the embedding's (Electra)
            self._head = self._graph(named, calls, self._run_head) if stage.last else None
        found = (node for node in self._body.nodes if isinstance(node.target, Attend))
        self.calls = {node.target.layer: node for node in found}

    def fused(self, plain: frozenset[int], tables: Set[str]) -> GraphSteps:
        """Returns the graphs with our kernels, and releases the class's weights. `plain`: layers
        whose attention the backend computes unchanged. `tables`: as in `fuse`."""
        graphs = [self._body] if self._head is None else [self._body, self._head]
        names = {name for group in self._steps.adapted for name in group}
        adapted, products = fuse(
            graphs, self._tensors, self._kernels, plain, names, tables, self._release
        )
        body = Program(self._body, self._tensors, "inputs")
        head = None if self._head is None else Program(self._head, self._tensors, "hidden")
        return GraphSteps(body, head, adapted, products, self._experts)

    def _release(self, tensor: Tensor) -> None:
        for module in self._steps.model.modules():
            for key, held in module._parameters.items():
                if held is tensor:
                    module._parameters[key] = None

    def _graph(
        self,
        named: Named,
        calls: Mapping[nn.Module, Callable[..., Tensor]],
        run: Callable[[Recorder, int], Tensor],
    ) -> Graph:
        runs = [Recorder(named, self._device) for _ in COUNTS]
        for recorder, count in zip(runs, COUNTS, strict=True):
            with _calling(calls, recorder), recording.by(recorder):
                recorder.output(run(recorder, count))
        self._tensors |= runs[0].tensors
        return merged(*runs)

    def _run_body(self, recorder: Recorder, count: int) -> Tensor:
        if self._stage.first:
            inputs = torch.empty(count, dtype=torch.long, device=META)
        else:
            inputs = self._hidden(count)
        positions = torch.empty(count, dtype=torch.long, device=META)
        recorder.input("inputs", inputs)
        recorder.input("positions", positions)
        recorder.input("step")
        with recorder:
            return self._steps.forward(inputs, positions, RecordedAnswers(recorder, positions))

    def _run_head(self, recorder: Recorder, count: int) -> Tensor:
        hidden = self._hidden(count)
        recorder.input("hidden", hidden)
        with recorder:
            return self._steps.logits(hidden)

    def _hidden(self, count: int) -> Tensor:
        return torch.empty(count, self._size, dtype=self._steps.model.dtype, device=META)


@contextmanager
def _calling(
    calls: Mapping[nn.Module, Callable[..., Tensor]], recorder: Recorder
) -> Iterator[None]:
    """Has the modules record one call each, for example experts, whose code depends on the routing.
    The call returns a tensor like its first argument, except for packed layers."""

    def instead(own: Callable[..., Tensor], target: Callable[..., Tensor]) -> Any:
        def forward(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            gated = bool(args or kwargs)  # some norms take a gate
            if isinstance(target, Norm) and (gated or target.weight.dtype != x.dtype):
                return own(x, *args, **kwargs)
            with torch._C.DisableTorchFunction():
                like = target.like(x) if isinstance(target, PackedCall) else torch.empty_like(x)
            return recorder.call(target, (x, *args), like, kwargs)

        return forward

    before = [module.__dict__.get("forward") for module in calls]
    for module, target in calls.items():
        module.forward = instead(module.forward, target)
    try:
        yield
    finally:
        for module, own in zip(calls, before, strict=True):
            del module.forward
            if own is not None:
                module.forward = own
