//! The tries of a delivery, from the first to the last.

use crate::text::{Moment, span};
use chrono::{DateTime, Utc};
use serde::Deserialize;

const WIDTH: f64 = 600.0;
const NARROWEST: f64 = 4.0;

/// One try, as the API has it.
#[derive(Clone, Debug, Deserialize)]
pub(crate) struct Try {
    pub began: Moment,
    /// `None`: it goes on, or its end is unknown.
    pub ended: Option<Moment>,
}

/// Tries on a line of time.
pub(crate) struct Tries {
    pub rows: Vec<Row>,
    pub took: String,
}

pub(crate) struct Row {
    pub number: usize,
    pub began: Moment,
    /// How it ended, in a word, and the class that colours it: `good`, `bad`, `runs` or `lost`.
    pub word: &'static str,
    pub class: &'static str,
    pub took: String,
    pub x: String,
    pub width: String,
}

impl Tries {
    /// `status` is that of the delivery: it says how the last try ended. `None` if nothing was tried.
    pub fn of(tries: &[Try], status: &str, now: DateTime<Utc>) -> Option<Tries> {
        let (first, last) = (tries.first()?, tries.last()?);
        let end = match (last.ended, status) {
            (Some(ended), _) => ended.0,
            (None, "sending") => now,
            (None, _) => last.began.0,
        };
        let whole = (end - first.began.0).num_milliseconds().max(1) as f64;
        let place = |at: DateTime<Utc>| (at - first.began.0).num_milliseconds() as f64 * WIDTH / whole;
        let row = |(at, one): (usize, &Try)| {
            let is_last = at + 1 == tries.len();
            let (word, class) = match (one.ended, is_last, status) {
                (None, true, "sending") => ("goes on", "runs"),
                (_, true, "uncertain") | (None, ..) => ("its end is unknown", "lost"),
                (Some(_), true, "sent") => ("sent", "good"),
                (Some(_), ..) => ("not sent", "bad"),
            };
            let to = one.ended.map_or(if class == "runs" { now } else { one.began.0 }, |ended| ended.0);
            let (from, width) = (place(one.began.0), (place(to) - place(one.began.0)).max(NARROWEST));
            let took = match class {
                "lost" => String::new(),
                _ => span((to - one.began.0).num_milliseconds()),
            };
            let x = format!("{:.1}", from.min(WIDTH - width));
            Row { number: at + 1, began: one.began, word, class, took, x, width: format!("{width:.1}") }
        };
        let rows = tries.iter().enumerate().map(row).collect();
        Some(Tries { rows, took: span(whole as i64) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(s: i64) -> Moment {
        Moment(DateTime::from_timestamp(1_000_000 + s, 0).expect("a time"))
    }

    fn drawn(tries: &[(i64, Option<i64>)], status: &str) -> Vec<(&'static str, String, String)> {
        let tries: Vec<Try> =
            tries.iter().map(|(began, ended)| Try { began: at(*began), ended: ended.map(at) }).collect();
        let tries = Tries::of(&tries, status, at(100).0).expect("tries");
        tries.rows.into_iter().map(|row| (row.word, row.x, row.took)).collect()
    }

    fn row(word: &'static str, x: &str, took: &str) -> (&'static str, String, String) {
        (word, x.to_owned(), took.to_owned())
    }

    #[test]
    fn each_try_says_how_it_ended() {
        let expected = [
            row("not sent", "0.0", "1.0 s"),
            row("its end is unknown", "100.0", ""),
            row("sent", "540.0", "6.0 s"),
        ];
        assert_eq!(drawn(&[(0, Some(1)), (10, None), (54, Some(60))], "sent"), expected);
        let open = [row("not sent", "0.0", "1.0 s"), row("goes on", "540.0", "10.0 s")];
        assert_eq!(drawn(&[(0, Some(1)), (90, None)], "sending"), open);
        assert_eq!(drawn(&[(0, None)], "uncertain"), [row("its end is unknown", "0.0", "")]);
        assert_eq!(drawn(&[(0, Some(0))], "queued"), [row("not sent", "0.0", "0 ms")]);
        assert!(Tries::of(&[], "queued", at(0).0).is_none());
    }
}
