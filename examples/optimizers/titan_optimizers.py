"""Add Lion, Schedule-Free AdamW and SOAP to `[optimizer]`. Their steps, and torch, are in titan_optimizer_steps.py."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from titan.config.base import Section


class LionSection(Section):
    """Lion (arXiv:2302.06675). A good rate is a third to a tenth of AdamW's, with three to ten times its decay."""

    name: Literal["Lion"] = "Lion"
    lr: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.99
    weight_decay: float = 0.5
    moments: ClassVar[int] = 1

    def build(self, parameters: Any) -> Any:
        """Return the optimizer."""
        import titan_optimizer_steps as steps

        return steps.Lion(steps.groups(parameters, self), betas=(self.beta1, self.beta2))


class ScheduleFreeSection(Section):
    """Schedule-Free AdamW (arXiv:2405.15682). Set `lr_scheduler.decay_ratio = 0`: the averaging replaces the decay."""

    name: Literal["ScheduleFree"] = "ScheduleFree"
    lr: float = 2.5e-3
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.1

    def build(self, parameters: Any) -> Any:
        """Return the optimizer."""
        import titan_optimizer_steps as steps

        betas = (self.beta1, self.beta2)
        return steps.ScheduleFree(steps.groups(parameters, self), betas=betas, eps=self.eps)


class SOAPSection(Section):
    """SOAP (arXiv:2409.11321): AdamW in the eigenbasis of Shampoo's factors, for matrices. Others take AdamW's step."""

    name: Literal["SOAP"] = "SOAP"
    lr: float = 3e-3
    beta1: float = 0.95
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.01
    basis_freq: int = 10
    """Steps from one eigenbasis to the next."""
    max_dim: int = 8192
    """A side that is longer has no factor."""

    def build(self, parameters: Any) -> Any:
        """Return the optimizer."""
        import titan_optimizer_steps as steps

        return steps.SOAP(
            steps.groups(parameters, self),
            betas=(self.beta1, self.beta2),
            eps=self.eps,
            basis_freq=self.basis_freq,
            max_dim=self.max_dim,
        )
