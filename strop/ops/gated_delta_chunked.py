"""The gated delta rule chunk by chunk, with its gradient: what `strop.ops.gated_delta` runs.

    N chunks    M positions in a chunk    J key heads, each with G value heads    C channels of a key, C_v of a value
    X = G * C_v: the value heads of one key head side by side, so that they have one matrix product with their key

What does not touch a state is computed for all chunks at once; then states pass from level to level of chunks, all
sequences of a level together, and in the backward pass from the last level to the first.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from strop.ops.chunks import Chunks, Level
from strop.ops.select import Impl


class GatedDelta(torch.autograd.Function):
    """Chunks forward, and backward by hand: autograd would keep four times as much, and pass over it more often.

    With G the running sum of g in a chunk, L_ij = exp(G_i - G_j) for j <= i, S the state before the chunk, and
    w_i = v_i - (what the state returns for k_i) the corrections:

        (I + B) w = v - exp(G) * (k S),  B_ij = (k_i k_j) L_ij b_j for j < i
        o = exp(G) * (q S) + P (b w),    P_ij = (q_i k_j) L_ij
        S' = exp(G_M) S + k^T (exp(G_M - G) b w)
    """

    @staticmethod
    def forward(
        ctx: Any,
        q_TJC: Tensor,
        k_TJC: Tensor,
        v_THC: Tensor,
        decay_TH: Tensor,
        beta_TH: Tensor,
        start_SHCC: Tensor | None,
        chunks: Chunks,
        ends: bool,
        keep: bool,
        impl: Impl,
    ) -> tuple[Tensor, Tensor | None]:
        """`ends`: also give final states; `keep`: a backward pass follows."""
        inputs = (q_TJC, k_TJC, v_THC, decay_TH, beta_TH, start_SHCC)
        cut = _Cut.of(chunks, k_TJC, v_THC)
        if impl is Impl.TRITON:
            from strop.ops import gated_delta_triton

            out_THC, ends_SHCC, states, w_NJGMC, inverse = gated_delta_triton.forward(*inputs, chunks=chunks, keep=keep)
        else:
            inside = _Inside.of(cut, q_TJC, k_TJC, decay_TH, beta_TH)
            inverse = inside.inverse()
            states, w_NJGMC, out_NJMX, ends_SHCC = _scan(
                cut, inside, inverse, cut.chunked(v_THC), start_SHCC, ends=ends, keep=keep
            )
            out_THC = cut.tokens(out_NJMX).view_as(v_THC)
        if states is not None:
            ctx.save_for_backward(*inputs, out_THC, states, w_NJGMC, inverse)
        ctx.cut = cut
        ctx.set_materialize_grads(False)
        return out_THC, ends_SHCC if ends else None

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return *_backward(ctx.cut, ctx.saved_tensors, grads[0], grads[1]), None, None, None, None


@dataclass(frozen=True, slots=True, eq=False)
class _Cut:
    """How [T, J, ...] becomes chunks [N, J, M, ...] and comes back."""

    chunks: Chunks
    heads: int  # J
    group: int  # G
    rows: Tensor
    padding: Tensor
    slots: Tensor

    @classmethod
    def of(cls, chunks: Chunks, k_TJC: Tensor, v_THC: Tensor) -> _Cut:
        J = k_TJC.shape[1]
        return cls(chunks, J, v_THC.shape[1] // J, chunks.rows_of(J), chunks.padding_of(J), chunks.slots_of(J))

    def chunked(self, x: Tensor) -> Tensor:
        """[T, J, C] or [T, H, C] or [T, H] -> [N, J, M, C or G * C or G]; padding is 0."""
        chunks, width = self.chunks, x.shape[1:].numel() // self.heads
        cut = x.reshape(len(x) * self.heads, width).index_select(0, self.rows).index_fill_(0, self.padding, 0.0)
        return cut.view(chunks.num_chunks, self.heads, chunks.size, width)

    def tokens(self, x_NJMX: Tensor) -> Tensor:
        """[N, J, M, X] -> [T, J, X]."""
        return x_NJMX.flatten(0, 2).index_select(0, self.slots).view(-1, self.heads, x_NJMX.shape[-1])

    def apart(self, x_NJMX: Tensor) -> Tensor:
        """The heads of a group side by side in the last axis, as an axis of their own: [N, J, G, M, C_v], a view."""
        return x_NJMX.unflatten(-1, (self.group, -1)).transpose(2, 3)

    def flat_state(self, state_SHCC: Tensor) -> Tensor:
        """[S, H, C, C_v] -> [S, J, C, G * C_v]: the heads of a group have one product with their common key."""
        return state_SHCC.unflatten(1, (self.heads, self.group)).transpose(2, 3).flatten(3)

    def full_state(self, state_SJCX: Tensor) -> Tensor:
        return state_SJCX.unflatten(3, (self.group, -1)).transpose(2, 3).flatten(1, 2)


@dataclass(frozen=True, slots=True, eq=False)
class _Inside:
    """What a chunk knows without the state before it."""

    q_NJMC: Tensor
    k_NJMC: Tensor
    beta_NJMG: Tensor
    fade_NJMG: Tensor  # exp(G_i): what is left of the state before the chunk
    left_NJMG: Tensor  # exp(G_M - G_i): what is left of a token at the chunk's end
    kept_NJG: Tensor  # exp(G_M)
    between_NJGMM: Tensor  # L
    qk_NJMM: Tensor
    kk_NJMM: Tensor

    @classmethod
    def of(cls, cut: _Cut, q_TJC: Tensor, k_TJC: Tensor, decay_TH: Tensor, beta_TH: Tensor) -> _Inside:
        q_NJMC, k_NJMC = cut.chunked(q_TJC), cut.chunked(k_TJC)
        sum_NJMG = cut.chunked(decay_TH).cumsum(2)
        sum_NJGM = sum_NJMG.transpose(2, 3)
        M = cut.chunks.size
        later = torch.ones(M, M, dtype=torch.bool, device=sum_NJMG.device).triu(1)
        between = torch.sub(sum_NJGM[..., :, None], sum_NJGM[..., None, :])
        turned = k_NJMC.transpose(2, 3)
        return cls(
            q_NJMC=q_NJMC,
            k_NJMC=k_NJMC,
            beta_NJMG=cut.chunked(beta_TH),
            fade_NJMG=sum_NJMG.exp(),
            left_NJMG=(sum_NJMG[:, :, -1:] - sum_NJMG).exp_(),
            kept_NJG=sum_NJMG[:, :, -1].exp(),
            between_NJGMM=between.masked_fill_(later, -torch.inf).exp_(),
            qk_NJMM=q_NJMC @ turned,
            kk_NJMM=k_NJMC @ turned,
        )

    def inverse(self) -> Tensor:
        """(I + B)^-1 [N, J, G, M, M], by one triangular solve a chunk and head."""
        B_NJGMM = self.between_NJGMM * self.kk_NJMM[:, :, None]
        B_NJGMM.mul_(self.beta_NJMG.transpose(2, 3)[..., None, :])
        one_MM = torch.eye(B_NJGMM.shape[-1], dtype=B_NJGMM.dtype, device=B_NJGMM.device)
        return torch.linalg.solve_triangular(B_NJGMM, one_MM, upper=False, unitriangular=True)

    def weights(self) -> Tensor:
        """P [N, J, G, M, M]."""
        return self.between_NJGMM * self.qk_NJMM[:, :, None]


def _scan(
    cut: _Cut,
    inside: _Inside,
    inverse_NJGMM: Tensor,
    v_NJMX: Tensor,
    start_SHCC: Tensor | None,
    *,
    ends: bool,
    keep: bool,
) -> tuple[Tensor | None, Tensor, Tensor, Tensor | None]:
    """Level by level: states before each chunk [N, J, C, X] if kept, corrections w, outputs, and final states."""
    chunks, C, X = cut.chunks, inside.k_NJMC.shape[-1], v_NJMX.shape[-1]
    P_NJGMM = inside.weights().mul_(inside.beta_NJMG.transpose(2, 3)[..., None, :])
    written_NJMG = inside.left_NJMG * inside.beta_NJMG
    w_NJGMC = v_NJMX.new_empty((*P_NJGMM.shape[:4], X // cut.group))
    out_NJMX = torch.empty_like(v_NJMX)
    states_NJCX = v_NJMX.new_empty((chunks.num_chunks, cut.heads, C, X)) if keep else None
    start_SJCX = None if start_SHCC is None else cut.flat_state(start_SHCC)
    ends_SJCX = _unread_ends(cut, start_SJCX, v_NJMX, C) if ends else None
    state = v_NJMX.new_zeros((0, cut.heads, C, X))
    kept_already = False
    for number, level in enumerate(chunks.levels):
        here = slice(level.first, level.end)
        state = _before(level, state, start_SJCX)
        if states_NJCX is not None and not kept_already:
            states_NJCX[here] = state
        q, k = inside.q_NJMC[here], inside.k_NJMC[here]
        fade = inside.fade_NJMG[here, ..., None]
        read = (k @ state).unflatten(-1, (cut.group, -1)).mul_(fade)
        wanted = torch.empty_like(w_NJGMC[here])
        torch.sub(cut.apart(v_NJMX[here]), read.transpose(2, 3), out=wanted)
        w = w_NJGMC[here]
        torch.bmm(inverse_NJGMM[here].flatten(0, 2), wanted.flatten(0, 2), out=w.flatten(0, 2))
        out = (q @ state).unflatten(-1, (cut.group, -1)).mul_(fade)
        torch.add(out, (P_NJGMM[here] @ w).transpose(2, 3), out=out_NJMX[here].unflatten(-1, (cut.group, -1)))
        written = torch.empty_like(out)
        torch.mul(w.transpose(2, 3), written_NJMG[here, ..., None], out=written)
        # the state after is computed in the place where the next level's will be kept, if all of them go on there
        following = chunks.levels[number + 1] if number + 1 < len(chunks.levels) else None
        if states_NJCX is not None and following is not None and following.takes_all(level):
            kept_already, after = True, states_NJCX[following.first : following.end]
        else:
            kept_already, after = False, torch.empty_like(state)
        faded = after.unflatten(-1, (cut.group, -1))
        torch.mul(state.unflatten(-1, (cut.group, -1)), inside.kept_NJG[here, :, None, :, None], out=faded)
        state = after
        state.flatten(0, 1).baddbmm_(k.flatten(0, 1).transpose(1, 2), written.flatten(3).flatten(0, 1))
        if ends_SJCX is not None and level.ends is not None:
            ends_SJCX[level.ends[1]] = state[level.ends[0]]
    return states_NJCX, w_NJGMC, out_NJMX, None if ends_SJCX is None else cut.full_state(ends_SJCX)


def _before(level: Level, after: Tensor, start_SJCX: Tensor | None) -> Tensor:
    """The states before a level's chunks [n, J, C, X], from those after the level before it."""
    count = level.end - level.first
    if level.root is not None:
        return after.new_zeros((count, *after.shape[1:])) if start_SJCX is None else start_SJCX[level.root]
    return after[:count] if level.source is None else after[level.source]


def _unread_ends(cut: _Cut, start_SJCX: Tensor | None, like: Tensor, C: int) -> Tensor:
    """Final states of sequences without any token, among room for all."""
    S = cut.chunks.num_sequences
    if start_SJCX is None:
        return like.new_zeros((S, cut.heads, C, like.shape[-1]))
    ends_SJCX = torch.zeros_like(start_SJCX)
    ends_SJCX[cut.chunks.unread[0]] = start_SJCX[cut.chunks.unread[1]]
    return ends_SJCX


def _backward(
    cut: _Cut, saved: tuple[Any, ...], dout_THC: Tensor | None, dends_SHCC: Tensor | None
) -> tuple[Tensor | None, ...]:
    """Gradients of q, k, v, decay, beta and start."""
    q_TJC, k_TJC, v_THC, decay_TH, beta_TH, start_SHCC, out_THC, states, w_NJGMC, inverse = saved
    if dout_THC is None:
        dout_THC = torch.zeros_like(v_THC)
    inside = _Inside.of(cut, q_TJC, k_TJC, decay_TH, beta_TH)
    v_NJMX, dout_NJMX = cut.chunked(v_THC), cut.chunked(dout_THC)
    dends_SJCX = None if dends_SHCC is None else cut.flat_state(dends_SHCC)
    back = _Back.of(cut, inside, v_NJMX)
    back.scan(states, w_NJGMC, inverse, dout_NJMX, dends_SJCX)
    back.inside_chunks(w_NJGMC, dout_NJMX)
    ddecay_NJMG = back.decay(w_NJGMC, v_NJMX, cut.chunked((dout_THC * out_THC).sum(-1)))
    dstart = None if start_SHCC is None else back.start(start_SHCC, dends_SJCX)
    return (
        cut.tokens(back.dq_NJMC).view_as(q_TJC),
        cut.tokens(back.dk_NJMC).view_as(k_TJC),
        cut.tokens(back.dv_NJMX).view_as(v_THC),
        cut.tokens(ddecay_NJMG).view_as(decay_TH),
        cut.tokens(back.dbeta_NJMG).view_as(beta_TH),
        dstart,
    )


@dataclass(slots=True, eq=False)
class _Back:
    """Gradients of a backward pass in the making, in chunks."""

    cut: _Cut
    inside: _Inside
    dq_NJMC: Tensor
    dk_NJMC: Tensor
    dv_NJMX: Tensor
    dw_NJGMC: Tensor  # of v - exp(G) k S, which is the gradient of v too
    dbeta_NJMG: Tensor
    dsum_NJG: Tensor  # of G_M, from the state after the chunk
    dstate: Tensor  # of the states before the first level's chunks, in the end

    @classmethod
    def of(cls, cut: _Cut, inside: _Inside, v_NJMX: Tensor) -> _Back:
        dw_NJGMC = torch.empty_like(cut.apart(v_NJMX), memory_format=torch.contiguous_format)
        return cls(
            cut=cut,
            inside=inside,
            dq_NJMC=torch.empty_like(inside.q_NJMC),
            dk_NJMC=torch.empty_like(inside.k_NJMC),
            dv_NJMX=torch.empty_like(v_NJMX),
            dw_NJGMC=dw_NJGMC,
            dbeta_NJMG=torch.empty_like(inside.beta_NJMG),
            dsum_NJG=torch.empty_like(inside.kept_NJG),
            dstate=v_NJMX.new_zeros((0, cut.heads, inside.k_NJMC.shape[-1], v_NJMX.shape[-1])),
        )

    def scan(
        self,
        states_NJCX: Tensor,
        w_NJGMC: Tensor,
        inverse_NJGMM: Tensor,
        dout_NJMX: Tensor,
        dends_SJCX: Tensor | None,
    ) -> None:
        """Last level first: what flows through the states."""
        inside, cut, split = self.inside, self.cut, (self.cut.group, -1)
        P_NJGMM = inside.weights()
        following: Level | None = None
        for level in reversed(cut.chunks.levels):
            here = slice(level.first, level.end)
            state, w, k, q = states_NJCX[here], w_NJGMC[here], inside.k_NJMC[here], inside.q_NJMC[here]
            beta, left, fade = (x[here, ..., None] for x in (inside.beta_NJMG, inside.left_NJMG, inside.fade_NJMG))
            dafter = self._after(level, following, dends_SJCX)
            reach = (k @ dafter).unflatten(-1, split)
            written = torch.empty_like(reach)
            torch.mul(w.transpose(2, 3), left * beta, out=written)
            self.dsum_NJG[here] = (written * reach).sum((2, 4))
            self.dsum_NJG[here] += (state * dafter).unflatten(-1, split).sum((2, 4)) * inside.kept_NJG[here]
            dn = P_NJGMM[here].transpose(3, 4) @ cut.apart(dout_NJMX[here])  # of b w
            dn += (reach * left).transpose(2, 3)
            self.dbeta_NJMG[here] = (dn * w).sum(-1).transpose(2, 3)
            dn *= inside.beta_NJMG[here].transpose(2, 3)[..., None]
            dw = self.dw_NJGMC[here]
            torch.bmm(inverse_NJGMM[here].flatten(0, 2).transpose(1, 2), dn.flatten(0, 2), out=dw.flatten(0, 2))
            self.dv_NJMX[here].unflatten(-1, split).copy_(dw.transpose(2, 3))
            dread = (self.dv_NJMX[here].unflatten(-1, split) * fade).neg_().flatten(3)
            dout = (dout_NJMX[here].unflatten(-1, split) * fade).flatten(3)
            turned = state.flatten(0, 1).transpose(1, 2)
            torch.bmm(dout.flatten(0, 1), turned, out=self.dq_NJMC[here].flatten(0, 1))
            dk = self.dk_NJMC[here].flatten(0, 1)
            torch.bmm(dread.flatten(0, 1), turned, out=dk)
            dk.baddbmm_(written.flatten(3).flatten(0, 1), dafter.transpose(2, 3).flatten(0, 1))
            dbefore = (dafter.unflatten(-1, split) * inside.kept_NJG[here, :, None, :, None]).flatten(3)
            dbefore.flatten(0, 1).baddbmm_(q.flatten(0, 1).transpose(1, 2), dout.flatten(0, 1))
            dbefore.flatten(0, 1).baddbmm_(k.flatten(0, 1).transpose(1, 2), dread.flatten(0, 1))
            self.dstate, following = dbefore, level

    def _after(self, level: Level, following: Level | None, dends_SJCX: Tensor | None) -> Tensor:
        """Gradient of the states after a level's chunks: from the chunks that go on, and from final states."""
        count = level.end - level.first
        dafter = self.dstate.new_zeros((count, *self.dstate.shape[1:]))
        if following is not None and following.source is None:
            dafter[: len(self.dstate)] = self.dstate
        elif following is not None and following.source is not None:
            dafter.index_add_(0, following.source, self.dstate)
        if dends_SJCX is not None and level.ends is not None:
            dafter.index_add_(0, level.ends[0], dends_SJCX[level.ends[1]])
        return dafter

    def inside_chunks(self, w_NJGMC: Tensor, dout_NJMX: Tensor) -> None:
        """What flows through P and B."""
        inside, cut = self.inside, self.cut
        beta_NJG1M = inside.beta_NJMG.transpose(2, 3)[..., None, :]
        w_NJGCM = w_NJGMC.transpose(3, 4)
        dB = (self.dw_NJGMC @ w_NJGCM).mul_(inside.between_NJGMM).tril_(-1)
        self.dbeta_NJMG -= (dB * inside.kk_NJMM[:, :, None]).sum(3).transpose(2, 3)
        dkk = dB.mul_(beta_NJG1M).sum(2)
        self.dk_NJMC -= (dkk + dkk.transpose(2, 3)) @ inside.k_NJMC
        dP = (cut.apart(dout_NJMX) @ w_NJGCM).mul_(inside.between_NJGMM)
        dqk = dP.mul_(beta_NJG1M).sum(2)
        self.dq_NJMC += dqk @ inside.k_NJMC
        self.dk_NJMC += dqk.transpose(2, 3) @ inside.q_NJMC

    def decay(self, w_NJGMC: Tensor, v_NJMX: Tensor, reads_NJMG: Tensor) -> Tensor:
        """Gradient of g. G_i scales all of o_i (`reads_NJMG` is do_i o_i) and all that w_i takes from v_i, and its
        inverse all that b_i writes."""
        taken = (w_NJGMC - self.cut.apart(v_NJMX)).mul_(self.dw_NJGMC).sum(-1).transpose(2, 3)
        dsum_NJMG = reads_NJMG + taken - self.inside.beta_NJMG * self.dbeta_NJMG
        dsum_NJMG[:, :, -1] += self.dsum_NJG
        return dsum_NJMG.flip(2).cumsum(2).flip(2)

    def start(self, start_SHCC: Tensor, dends_SJCX: Tensor | None) -> Tensor:
        dstart_SJCX = torch.zeros_like(self.cut.flat_state(start_SHCC))
        first = self.cut.chunks.levels[0] if self.cut.chunks.levels else None
        if first is not None and first.root is not None:
            dstart_SJCX.index_add_(0, first.root, self.dstate)
        if dends_SJCX is not None:
            unread, whose = self.cut.chunks.unread
            dstart_SJCX.index_add_(0, whose, dends_SJCX[unread])
        return self.cut.full_state(dstart_SJCX)
