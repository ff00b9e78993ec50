//! Where each moment of the waterfall is drawn.

use super::{Bar, WIDTH};

/// A stretch without work is drawn at most this long, as a part of all work.
const LONGEST_REST: f64 = 0.15;

/// Where each moment is drawn.
pub(super) struct Scale {
    /// Moments, and their places.
    places: Vec<(i64, f64)>,
    pub shortened: bool,
}

impl Scale {
    pub fn of(bars: &[Bar], begin: i64, end: i64) -> Scale {
        let mut moments: Vec<i64> =
            bars.iter().flat_map(|bar| [bar.from, bar.to]).chain([begin, end]).collect();
        moments.sort_unstable();
        moments.dedup();
        let works = |from: i64, to: i64| {
            let is_work = |bar: &&Bar| matches!(bar.class, "model" | "tool" | "bad" | "lost");
            bars.iter().filter(is_work).any(|bar| bar.from <= from && bar.to >= to)
        };
        let stretches: Vec<(i64, i64, bool)> =
            moments.windows(2).map(|pair| (pair[0], pair[1], works(pair[0], pair[1]))).collect();
        let work: i64 = stretches.iter().filter(|(.., works)| *works).map(|(from, to, _)| to - from).sum();
        let longest = if work > 0 { work as f64 * LONGEST_REST } else { f64::MAX };
        let (mut at, mut shortened) = (0.0, false);
        let mut places = vec![(begin, 0.0)];
        for (from, to, works) in stretches {
            let length = (to - from) as f64;
            let drawn = if works { length } else { length.min(longest) };
            shortened |= drawn < length;
            at += drawn;
            places.push((to, at));
        }
        let all = if at > 0.0 { at } else { 1.0 };
        for place in &mut places {
            place.1 *= WIDTH / all;
        }
        Scale { places, shortened }
    }

    /// Every moment that is asked for is one of a bar, so it has a place.
    pub fn x(&self, moment: i64) -> f64 {
        let found = self.places.binary_search_by_key(&moment, |(at, _)| *at);
        found.map_or(0.0, |at| self.places[at].1)
    }
}
