use super::*;

fn at(text: &str) -> DateTime<Utc> {
    text.parse().unwrap()
}

fn timing(pattern: &str, zone: &str) -> Timing {
    Timing::parse(pattern, zone).unwrap()
}

/// The ticks of (`from`, `until`], in UTC without the date's year and the seconds.
fn between(pattern: &str, zone: &str, from: &str, until: &str) -> Vec<String> {
    let (timing, until) = (timing(pattern, zone), at(until));
    timing
        .ticks(at(from))
        .take_while(|tick| *tick <= until)
        .map(|tick| tick.format("%m-%dT%H:%M").to_string())
        .collect()
}

#[test]
fn one_time_of_day_fires_once_on_a_day_without_it_and_on_a_day_with_two_of_it() {
    // (zone, time of day, from, until, ticks): the day before, the day of the change, the day after.
    for (zone, pattern, from, until, ticks) in [
        // 02:00 becomes 03:00: 02:30 fires at 03:00 CEST.
        (
            "Europe/Berlin",
            "30 2 * * *",
            "2026-03-28T00:00:00Z",
            "2026-03-31T00:00:00Z",
            ["03-28T01:30", "03-29T01:00", "03-30T00:30"],
        ),
        // 03:00 becomes 02:00: the first 02:30, of CEST.
        (
            "Europe/Berlin",
            "30 2 * * *",
            "2026-10-23T23:00:00Z",
            "2026-10-26T23:00:00Z",
            ["10-24T00:30", "10-25T00:30", "10-26T01:30"],
        ),
        (
            "America/New_York",
            "30 2 * * *",
            "2026-03-07T00:00:00Z",
            "2026-03-10T00:00:00Z",
            ["03-07T07:30", "03-08T07:00", "03-09T06:30"],
        ),
        (
            "America/New_York",
            "30 1 * * *",
            "2026-10-31T00:00:00Z",
            "2026-11-03T00:00:00Z",
            ["10-31T05:30", "11-01T05:30", "11-02T06:30"],
        ),
        // Half an hour: 02:00 becomes 02:30, so 02:15 fires at 02:30 (+11:00).
        (
            "Australia/Lord_Howe",
            "15 2 * * *",
            "2026-10-02T12:00:00Z",
            "2026-10-05T12:00:00Z",
            ["10-02T15:45", "10-03T15:30", "10-04T15:15"],
        ),
        // 02:00 becomes 01:30: the first 01:45, of +11:00.
        (
            "Australia/Lord_Howe",
            "45 1 * * *",
            "2026-04-03T00:00:00Z",
            "2026-04-06T00:00:00Z",
            ["04-03T14:45", "04-04T14:45", "04-05T15:15"],
        ),
    ] {
        assert_eq!(between(pattern, zone, from, until), ticks, "{zone} {pattern}");
    }
}

#[test]
fn an_interval_follows_the_clock_on_the_wall_through_both_changes() {
    // The skipped hour has no quarters, and the repeated one has them twice: in real time they are 15 minutes apart.
    for (zone, from, until, count) in [
        ("Europe/Berlin", "2026-03-28T23:00:00Z", "2026-03-29T22:00:00Z", 23 * 4),
        ("Europe/Berlin", "2026-10-24T22:00:00Z", "2026-10-25T23:00:00Z", 25 * 4),
        ("America/New_York", "2026-03-08T05:00:00Z", "2026-03-09T04:00:00Z", 23 * 4),
        ("America/New_York", "2026-11-01T04:00:00Z", "2026-11-02T05:00:00Z", 25 * 4),
        ("Australia/Lord_Howe", "2026-10-03T13:30:00Z", "2026-10-04T13:00:00Z", 47 * 2),
        ("Australia/Lord_Howe", "2026-04-04T13:00:00Z", "2026-04-05T13:30:00Z", 49 * 2),
    ] {
        let timing = timing("*/15 * * * *", zone);
        let until = at(until);
        let ticks: Vec<_> = timing.ticks(at(from)).take_while(|tick| *tick <= until).collect();
        assert_eq!(ticks.len(), count, "{zone} {from}");
        assert!(ticks.windows(2).all(|pair| pair[1] - pair[0] == TimeDelta::minutes(15)), "{zone} {ticks:?}");
    }
    // A pattern with several times of day follows the wall clock too.
    assert_eq!(
        between("30 2,14 * * *", "Europe/Berlin", "2026-03-28T23:00:00Z", "2026-03-29T22:00:00Z"),
        ["03-29T12:30"]
    );
}

#[test]
fn what_is_no_timing_is_refused_with_its_reason() {
    for (pattern, zone, reason) in [
        ("61 * * * *", "UTC", "is no cron pattern: its minute is \"61\", and must be 0 to 59"),
        ("0 25 * * *", "UTC", "its hour is \"25\""),
        ("0 9 * * SOON", "UTC", "its day of the week is \"SOON\", and must be 0 to 7, or SUN to SAT"),
        ("61 0 9 * * *", "UTC", "its second is \"61\""),
        ("0 0 9 32 * *", "UTC", "its day of the month is \"32\""),
        ("* * *", "UTC", "is no cron pattern: it has 3 fields, and must have five (minute, hour,"),
        ("", "UTC", "is no cron pattern: it has 0 fields"),
        ("* * * * * * 2030", "UTC", "it has 7 fields"),
        ("@often", "UTC", "of this kind there are @yearly, @monthly, @weekly, @daily and @hourly"),
        ("0 0 30 2 *", "UTC", "names no day that ever comes"),
        ("@daily", "Mars/Olympus", "is no time zone"),
        ("@daily", "", "is no time zone"),
    ] {
        let refused = Timing::parse(pattern, zone).expect_err(pattern).to_string();
        assert!(refused.contains(reason), "{pattern:?} {zone:?}: {refused}");
    }
    for pattern in ["@daily", "*/5 * * * *", "0 9 * * MON-FRI", "*/10 * * * * *", "0 0 29 2 *", "0 9 L * *"] {
        assert!(Timing::parse(pattern, "America/New_York").is_ok(), "{pattern}");
    }
}

#[test]
fn ten_minutes_down_are_skipped_made_good_once_or_all_made_good_up_to_the_limit() {
    let timing = timing("* * * * *", "UTC");
    let (last, now) = (at("2026-06-01T12:00:00Z"), at("2026-06-01T12:10:20Z"));
    let minutes = |from: u32, to: u32| -> Vec<DateTime<Utc>> {
        (from..=to).map(|minute| at(&format!("2026-06-01T12:{minute:02}:00Z"))).collect()
    };
    let passed = |decision: &Decision| decision.passed.as_ref().map_or(0, |passed| passed.count);
    for (missed, limit, fire) in [
        // The newest is on time.
        (Missed::Skip, 10, minutes(10, 10)),
        (Missed::One, 10, minutes(10, 10)),
        (Missed::All, 100, minutes(1, 10)),
        (Missed::All, 10, minutes(1, 10)),
        (Missed::All, 4, minutes(7, 10)),
    ] {
        let decision = decide(&timing, missed, limit, last, now);
        assert_eq!(decision.fire, fire, "{missed:?} {limit}");
        assert_eq!(passed(&decision), 10 - fire.len(), "{missed:?} {limit}");
        assert_eq!(decision.last_tick, at("2026-06-01T12:10:00Z"));
        assert_eq!(decision.next_at, Some(at("2026-06-01T12:11:00Z")));
    }
    // Hourly, and back ten minutes late: nothing is on time.
    let hourly = Timing::parse("0 * * * *", "UTC").unwrap();
    let (last, now) = (at("2026-06-01T11:00:00Z"), at("2026-06-01T12:10:00Z"));
    for (missed, fires) in [(Missed::Skip, false), (Missed::One, true), (Missed::All, true)] {
        let decision = decide(&hourly, missed, 10, last, now);
        assert_eq!(decision.fire, if fires { minutes(0, 0) } else { vec![] }, "{missed:?}");
        assert_eq!(passed(&decision), usize::from(!fires), "{missed:?}");
        assert_eq!(decision.last_tick, at("2026-06-01T12:00:00Z"));
    }
}

#[test]
fn a_clock_that_jumps_back_finds_nothing_due_until_it_is_past_what_was_decided() {
    let timing = timing("*/5 * * * *", "Europe/Berlin");
    let last = at("2026-06-01T12:00:00Z");
    for now in
        ["2026-06-01T12:00:00Z", "2026-06-01T11:59:59Z", "2026-06-01T03:00:00Z", "1999-01-01T00:00:00Z"]
    {
        let decision = decide(&timing, Missed::All, 10, last, at(now));
        assert_eq!((decision.fire.len(), decision.last_tick), (0, last), "{now}");
        assert_eq!(decision.next_at, Some(at("2026-06-01T12:05:00Z")), "{now}");
    }
}

#[test]
fn a_schedule_of_every_second_that_nobody_looked_at_for_years_is_decided_at_once() {
    let timing = timing("* * * * * *", "Australia/Lord_Howe");
    let decision = decide(&timing, Missed::All, 3, at("2000-01-01T00:00:00Z"), at("2026-06-01T12:00:00.5Z"));
    assert_eq!(decision.fire.last(), Some(&at("2026-06-01T12:00:00Z")));
    assert_eq!(decision.fire.len(), 3);
    let passed = decision.passed.unwrap();
    assert_eq!((passed.count, passed.more), (COUNTED, true));
    assert_eq!(
        passed.reason(Missed::All),
        "missed: more than 1000 ticks since 2000-01-01T00:00:01Z, missed = all"
    );
}

#[test]
fn what_the_agent_is_told_names_the_tick_in_the_schedules_zone() {
    let timing = timing("30 2 * * *", "Europe/Berlin");
    let text = message("Write the report.\n", &timing, at("2026-03-29T01:00:00Z"));
    assert_eq!(text, "Write the report.\n\nScheduled for 2026-03-29 03:00:00 +02:00 Europe/Berlin.");
    assert_eq!(trigger_id("sched_1", at("2026-03-29T01:00:00Z")), "cron:sched_1:2026-03-29T01:00:00Z");
}
