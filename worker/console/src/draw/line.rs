//! A line over time, and bars side by side.

use std::fmt::Write as _;

/// The drawing's size in its own units.
pub(crate) const WIDTH: f64 = 600.0;
const HEIGHT: f64 = 80.0;
const TOP: f64 = 6.0;
/// The most room of one bar: few bars stand side by side.
const WIDEST: f64 = 44.0;

/// A line with the area below it. The values are evenly spaced.
pub(crate) struct Line {
    pub line: String,
    pub area: String,
    pub highest: f64,
}

impl Line {
    /// `None` if there are fewer than two values.
    pub fn of(values: &[f64]) -> Option<Line> {
        if values.len() < 2 {
            return None;
        }
        let highest = values.iter().copied().fold(0.0, f64::max);
        let step = WIDTH / (values.len() - 1) as f64;
        let scale = if highest > 0.0 { (HEIGHT - TOP) / highest } else { 0.0 };
        let mut line = String::new();
        for (at, value) in values.iter().enumerate() {
            let _ = write!(line, "{:.1},{:.1} ", at as f64 * step, HEIGHT - value * scale);
        }
        let area = format!("0,{HEIGHT} {line}{WIDTH},{HEIGHT}");
        Some(Line { line: line.trim_end().to_owned(), area, highest })
    }
}

/// One bar of several parts, each with the class that colours it.
pub(crate) struct Bar {
    pub parts: Vec<Part>,
    pub title: String,
    /// Where it begins, for what is marked there.
    pub x: String,
}

pub(crate) struct Part {
    pub x: String,
    pub y: String,
    pub width: String,
    pub height: String,
    pub class: &'static str,
}

/// Bars side by side, as high as their parts together.
pub(crate) struct Bars {
    pub bars: Vec<Bar>,
}

impl Bars {
    /// Each bar has a title, and parts from the bottom up.
    pub fn of(values: Vec<(String, Vec<(&'static str, f64)>)>) -> Bars {
        let sum = |parts: &[(&str, f64)]| parts.iter().map(|(_, value)| value).sum::<f64>();
        let highest = values.iter().map(|(_, parts)| sum(parts)).fold(0.0, f64::max).max(1.0);
        let room = (WIDTH / values.len().max(1) as f64).min(WIDEST);
        let width = room * 0.72;
        let bars = values.into_iter().enumerate().map(|(at, (title, parts))| {
            let mut y = HEIGHT;
            let parts = parts.into_iter().map(|(class, value)| {
                let height = value * (HEIGHT - TOP) / highest;
                y -= height;
                Part {
                    x: format!("{:.1}", at as f64 * room),
                    y: format!("{y:.1}"),
                    width: format!("{width:.1}"),
                    height: format!("{height:.1}"),
                    class,
                }
            });
            Bar { parts: parts.collect(), title, x: format!("{:.1}", at as f64 * room) }
        });
        Bars { bars: bars.collect() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_ends_where_its_values_end() {
        let line = Line::of(&[0.0, 2.0, 1.0]).unwrap();
        assert_eq!(line.line, "0.0,80.0 300.0,6.0 600.0,43.0");
        assert_eq!(line.highest, 2.0);
        assert!(Line::of(&[1.0]).is_none());
        assert!(Line::of(&[0.0, 0.0]).unwrap().line.ends_with("600.0,80.0"));
    }

    #[test]
    fn the_highest_bar_fills_the_drawing() {
        let bars =
            Bars::of(vec![("a".into(), vec![("in", 3.0), ("out", 1.0)]), ("b".into(), vec![("in", 2.0)])]);
        let heights = |at: usize| {
            bars.bars[at].parts.iter().map(|part| part.height.parse::<f64>().unwrap()).sum::<f64>()
        };
        assert!((heights(0) - 74.0).abs() < 0.2 && (heights(1) - 37.0).abs() < 0.2);
        assert!(Bars::of(Vec::new()).bars.is_empty());
    }
}
