//! Tests: `decide` against an enumeration of the ticks, for any sequence of clock readings with jumps, gaps
//! and crashes.

use super::*;
use proptest::prelude::*;
use std::collections::BTreeSet;

/// Seconds since the epoch: February 2026, before both clock changes of that year in the zones below.
const BEGIN: i64 = 1_772_000_000;

fn instant(seconds: i64) -> DateTime<Utc> {
    DateTime::from_timestamp(seconds, 0).unwrap()
}

fn patterns() -> impl Strategy<Value = &'static str> {
    prop::sample::select(vec![
        "* * * * *",
        "*/15 * * * *",
        "0 * * * *",
        "30 2 * * *",
        "45 1 * * *",
        "30 1,2,3 * * *",
        "0 9 * * MON-FRI",
        "0 0 1 * *",
        "20 */10 1-3 * * *",
    ])
}

fn zones() -> impl Strategy<Value = &'static str> {
    prop::sample::select(vec![
        "UTC",
        "Europe/Berlin",
        "America/New_York",
        "Australia/Lord_Howe",
        "Asia/Kathmandu",
    ])
}

/// One reading of the clock: how far it moved since the last one, and whether the process dies before it
/// stores anything.
fn looks() -> impl Strategy<Value = Vec<(i64, bool)>> {
    let delta = prop_oneof![
        4 => 0..90i64,
        3 => 0..4000i64,
        1 => -8000..0i64,
        1 => 0..300_000i64,
        1 => -300_000..0i64,
    ];
    prop::collection::vec((delta, prop::bool::weighted(0.2)), 1..40)
}

fn missed() -> impl Strategy<Value = Missed> {
    prop::sample::select(vec![Missed::Skip, Missed::One, Missed::All])
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, ..ProptestConfig::default() })]

    #[test]
    fn each_due_tick_is_fired_as_the_policy_says_and_never_twice(
        pattern in patterns(), zone in zones(), looks in looks(), missed in missed(), limit in 1u32..40,
        begin in 0..25_000_000i64,
    ) {
        let timing = Timing::parse(pattern, zone).unwrap();
        let start = instant(BEGIN + begin);
        let (mut clock, mut last_tick) = (start, start);
        let mut fired = BTreeSet::new();
        for (delta, dies) in looks {
            clock += TimeDelta::seconds(delta);
            let decision = decide(&timing, missed, limit, last_tick, clock);
            let due: Vec<_> = timing.ticks(last_tick).take_while(|tick| *tick <= clock).collect();
            let wanted: Vec<_> = match missed {
                Missed::Skip => due.last().filter(|tick| clock - **tick <= ON_TIME).into_iter().copied().collect(),
                Missed::One => due.last().into_iter().copied().collect(),
                Missed::All => due[due.len().saturating_sub(limit as usize)..].to_vec(),
            };
            prop_assert_eq!(&decision.fire, &wanted);
            let passed = decision.passed.as_ref().map_or(0, |passed| passed.count);
            prop_assert_eq!(passed, (due.len() - wanted.len()).min(COUNTED));
            prop_assert_eq!(decision.last_tick, due.last().copied().unwrap_or(last_tick));
            prop_assert_eq!(decision.next_at, timing.after(decision.last_tick));
            if dies {
                // Nothing was stored, so the next reading finds at least the same ticks.
                continue;
            }
            for tick in decision.fire {
                prop_assert!(tick <= clock);
                prop_assert!(fired.insert(tick), "{} was fired twice", tick);
            }
            last_tick = decision.last_tick;
        }
    }

    #[test]
    fn ticks_are_in_order_and_each_is_on_the_wall_of_its_zone(
        pattern in patterns(), zone in zones(), begin in 0..25_000_000i64,
    ) {
        let timing = Timing::parse(pattern, zone).unwrap();
        let ticks: Vec<_> = timing.ticks(instant(BEGIN + begin)).take(50).collect();
        prop_assert_eq!(ticks.len(), 50);
        prop_assert!(ticks.windows(2).all(|pair| pair[0] < pair[1]));
        for tick in ticks {
            let local = tick.with_timezone(&timing.zone);
            let second_before = (tick - TimeDelta::seconds(1)).with_timezone(&timing.zone);
            // Only the first instant after a gap may replace a time that the day does not have.
            let after_gap = local.naive_local() - second_before.naive_local() > TimeDelta::seconds(1);
            prop_assert!(timing.cron.is_time_matching(&local).unwrap() || after_gap, "{}", local);
        }
    }
}
