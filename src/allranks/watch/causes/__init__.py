"""Which causes can be told, and which is asked first?

A cause is one file: CODE, NAME, and `find(case)`, which gives its verdict if the evidence shows it. They are asked in
this order: what ended explains what waits; a stopped process explains an absent one; a line of code comes last.
"""

from __future__ import annotations

from typing import Protocol

from allranks.watch.case import Case
from allranks.watch.causes import (
    aborted,
    agent_died,
    aliased,
    buffers,
    buffers_differ,
    crashed,
    cut_off,
    deadlock,
    debugger,
    destroyed,
    drift,
    endless_loop,
    exited,
    failed_call_caught,
    file_lock,
    file_not_there,
    finished,
    floored,
    from_thread,
    gil_held,
    gradient_not_finite,
    groups_differ,
    guarded,
    input_wait,
    killed,
    leak,
    left_loop,
    left_over,
    listed_differently,
    loader_died,
    loader_stuck,
    lost_peers,
    mean_of_means,
    models_differ,
    names_unmatched,
    network_wait,
    never_averaged,
    never_met,
    never_trained,
    no_data,
    node_lost,
    not_coming,
    not_divided,
    not_finite,
    not_reachable,
    not_split,
    one_file,
    one_path,
    other_dtype,
    other_line,
    other_operation,
    other_reduction,
    other_root,
    other_shape,
    out_of_memory,
    own_entry,
    padded,
    path_broken,
    port_taken,
    program,
    raised,
    rates_differ,
    ready_twice,
    same_order,
    same_randomness,
    same_samples,
    scheduler_too_often,
    shm_full,
    sleeping,
    split_differs,
    stale_lock,
    static_graph,
    stopped,
    straggler,
    stray_call,
    too_many_files,
    uneven,
    unfrozen,
    uninterruptible,
    unused,
    versions_differ,
    works_alone,
    write_stuck,
    wrong_address,
    wrong_identity,
)
from allranks.watch.verdict import Verdict


class Cause(Protocol):
    """One file of this package."""

    @property
    def CODE(self) -> str:
        """ARnnn."""
        ...

    @property
    def NAME(self) -> str:
        """kebab-case."""
        ...

    def find(self, case: Case) -> Verdict | None:
        """The verdict, if the evidence shows this cause."""
        ...


CAUSES: tuple[Cause, ...] = (
    # this node alone, or a node is gone
    cut_off, node_lost, agent_died,
    # ended, by what is known of the error
    wrong_identity, port_taken, wrong_address, not_reachable,
    unused, ready_twice, static_graph, models_differ, stray_call,
    shm_full, one_file, too_many_files, loader_died, file_not_there, debugger, raised,
    out_of_memory, killed, crashed, aborted, exited,
    # stopped
    stopped, stale_lock,
    # communication that cannot meet
    groups_differ, from_thread, uneven, left_loop, other_operation, other_dtype, other_shape, other_root, other_reduction, other_line,
    destroyed, finished, buffers, guarded,
    # stuck outside communication
    uninterruptible, never_met, gil_held, loader_stuck, works_alone, deadlock, sleeping, input_wait, file_lock, write_stuck,
    network_wait, program, endless_loop, not_coming,
    # the network, slow, and what is left
    path_broken, versions_differ, straggler, not_finite, rates_differ, unfrozen, drift, lost_peers,
)  # fmt: skip

SILENT: tuple[Cause, ...] = (
    # data
    listed_differently, split_differs, same_samples, not_divided, same_order, not_split, no_data, same_randomness, padded, leak,
    # training
    gradient_not_finite, never_averaged, buffers_differ, never_trained, scheduler_too_often, one_path,
    left_over, aliased, floored, own_entry, mean_of_means, names_unmatched, failed_call_caught,
)  # fmt: skip
"""Asked when ranks have noted something of their data, replicas or files; all that are found are said."""
