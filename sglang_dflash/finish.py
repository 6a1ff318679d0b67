# SPDX-License-Identifier: Apache-2.0
"""Where a request ends, though a step commits several tokens: what SGLang keeps of such a run.

SGLang appends a run whole and asks afterwards whether it ends the request. Plain decoding asks
after each token, and has nothing behind the last.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.session.session_controller import Session
    from sglang.srt.session.streaming_session import StreamingSession

__all__ = ["drop_what_follows_the_end", "end_token_by_token", "keep_computed_length"]


def end_token_by_token(
    original: Callable[[Req, int], None], request: Req, new_accepted_len: int = 1
) -> None:
    """End a request after the first token of a run that ends it, and for that token's reason.

    SGLang looks for stop strings in the whole run before it looks for stop tokens: a string behind
    the token that ends the request would win.

    Args:
        original: `Req.update_finish_state`.
        request: its self; the run is the end of its output, and stays there.
        new_accepted_len: tokens of the run.
    """
    if new_accepted_len <= 1 or request.finished() or request.to_finish:
        original(request, new_accepted_len)
        return
    params = request.sampling_params
    if params.stop_strs or params.stop_regex_strs:
        _feed(original, request, new_accepted_len)
    else:  # the first stop token, or the limit before it: SGLang's own rule for a run
        original(request, new_accepted_len)
    if request.finished():
        shown = len(request.output_ids_through_stop)
        request.reasoning_tokens = min(request.reasoning_tokens, shown)


def _feed(original: Callable[[Req, int], None], request: Req, num_tokens: int) -> None:
    """Ask after each token of a run; what is behind the end stays in the output.

    K/V and log-probabilities are counted by the whole run.
    """
    run = request.output_ids[-num_tokens:]
    grammar, request.grammar = request.grammar, None  # it stands behind the run's last token
    del request.output_ids[-num_tokens:]
    for place, token in enumerate(run):
        request.output_ids.append(token)
        if place == num_tokens - 1:
            request.grammar = grammar
        original(request, 1)
        if request.finished():
            break
    request.grammar = grammar
    if request.finished() and request.finished_len is None:
        request.finished_len = len(request.output_ids)
    request.output_ids.extend(run[place + 1 :])


def drop_what_follows_the_end(session: Session) -> None:
    """Take from a session's turns the tokens behind their end, before the next turn copies them."""
    for node in session.req_nodes.values():
        turn = node.req
        if turn.finished() and turn.finished_len is not None:
            del turn.output_ids[turn.finished_len :]


def keep_computed_length(
    original: Callable[[StreamingSession, Req], bool], sessions: StreamingSession, req: Req
) -> bool:
    """Let a streaming session count as cached what was computed, not what was reserved.

    SGLang counts up to the turn's last token, bounded by its slots; plain decoding has no slot for
    that one, whose K/V is not computed. A speculative reserve has.

    Args:
        original: `StreamingSession.try_cache_finished_req`.
        sessions: its self.
        req: the turn that ended.
    """
    slot = sessions.borrowed_slot(req)
    computed = req.kv.kv_committed_len  # without the next anchor, which no step has read yet
    is_kept = original(sessions, req)
    if is_kept and slot is not None:
        slot.kv.kv_committed_len = min(slot.kv.kv_committed_len, computed)
    return is_kept
