//! Every kill of a step, and what it may cost. Without a kill: no repeated call, nothing uncertain, and two
//! effects per tool (one per message).

use super::{BOTH, GUARDED, IDEMPOTENT, Kill, Row};

const fn row(
    k: &'static str,
    tools: &'static [&'static str],
    kill: Kill,
    repeated: usize,
    uncertain: usize,
    effects: (usize, usize),
) -> Row {
    Row { k, tools, kill, repeated, uncertain, effects }
}

pub(super) const ROWS: &[Row] = &[
    row("K3", BOTH, Kill::At("K3=1*return"), 0, 0, (2, 2)),
    row("K5", BOTH, Kill::At("K5=1*return"), 0, 0, (2, 2)),
    // Only the model call that was in flight is made again.
    row("K6", GUARDED, Kill::DuringModelCall(0), 1, 0, (2, 0)),
    row("K6", IDEMPOTENT, Kill::DuringModelCall(1), 1, 0, (0, 2)),
    // The answer had arrived but was not committed: the one answer that is paid for twice.
    row("K10", GUARDED, Kill::At("K10=1*return"), 1, 0, (2, 0)),
    row("K10", GUARDED, Kill::At("K10_commit=1*return"), 1, 0, (2, 0)),
    row("K10", IDEMPOTENT, Kill::At("K21=1*off->1*return"), 1, 0, (0, 2)),
    // `invoked` proves that the call never ran. An idempotent one is `started` by then, and runs again.
    row("K17", GUARDED, Kill::At("K17=1*return"), 0, 0, (2, 0)),
    row("K17", IDEMPOTENT, Kill::At("K17=1*return"), 0, 0, (0, 2)),
    row("K17", BOTH, Kill::At("K17=1*return"), 0, 0, (2, 2)),
    // `started`: no one can tell from the outside whether the effect happened. At the failpoint it did not,
    // so the one effect is the second message's. A kill in the middle of the tool comes after the effect.
    row("K18", GUARDED, Kill::At("K18=1*return"), 0, 1, (1, 0)),
    row("K18", GUARDED, Kill::DuringTool("charge"), 0, 1, (2, 0)),
    row("K18", IDEMPOTENT, Kill::At("K18=1*return"), 0, 0, (0, 2)),
    row("K18", IDEMPOTENT, Kill::DuringTool("reserve"), 0, 0, (0, 3)),
    row("K19", GUARDED, Kill::At("K19=1*return"), 0, 1, (2, 0)),
    row("K19", IDEMPOTENT, Kill::At("K19=1*return"), 0, 0, (0, 3)),
    // The other call has settled: only the open one is recovered.
    row("K20", BOTH, Kill::DuringTool("reserve"), 0, 0, (2, 3)),
    row("K20", BOTH, Kill::DuringTool("charge"), 0, 1, (2, 2)),
    // The step's commit records how its last call ended, so without that commit it may have run, as at K19.
    row("K21", GUARDED, Kill::At("K21=1*return"), 0, 1, (2, 0)),
    row("K21", IDEMPOTENT, Kill::At("K21=1*return"), 0, 0, (0, 3)),
    // The commits of a run, in order: it begins, the turn with its calls, the step, the reply.
    row("K22", BOTH, Kill::At("K22=1*return"), 0, 0, (2, 2)),
    row("K22", BOTH, Kill::At("K22=1*off->1*return"), 0, 0, (2, 2)),
    row("K22", GUARDED, Kill::At("K22=2*off->1*return"), 0, 0, (2, 0)),
    row("K22", IDEMPOTENT, Kill::At("K22=2*off->1*return"), 0, 0, (0, 2)),
    row("K22", BOTH, Kill::At("K22=2*off->1*return"), 0, 0, (2, 2)),
    row("K22", BOTH, Kill::At("K22=3*off->1*return"), 0, 0, (2, 2)),
];
