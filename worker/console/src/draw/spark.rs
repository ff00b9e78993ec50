//! Small columns beside a number: what it was in each hour.

use std::fmt::Display;

const WIDTH: f64 = 240.0;
const HEIGHT: f64 = 28.0;
/// The lowest column that can be seen.
const LOWEST: f64 = 1.5;

/// One column a value, the oldest first. Nothing is drawn where a value is zero.
pub(crate) struct Spark {
    pub columns: Vec<Column>,
    /// The picture in words.
    pub said: String,
    /// How many values there are, also those that are zero.
    hours: usize,
}

pub(crate) struct Column {
    pub x: String,
    pub y: String,
    pub width: String,
    pub height: String,
    pub title: String,
}

impl Spark {
    /// `name` says what is drawn; `shown` writes a value. The last value is of the hour that runs.
    pub fn of<Shown: Display>(name: &str, values: &[f64], shown: impl Fn(f64) -> Shown) -> Spark {
        let highest = values.iter().copied().fold(0.0, f64::max);
        let room = WIDTH / values.len().max(1) as f64;
        let width = (room * 0.7).max(1.0);
        let hours = values.len();
        let ago = |at: usize| match hours - 1 - at {
            0 => "this hour".to_owned(),
            ago => format!("{ago} h ago"),
        };
        let columns = values.iter().enumerate().filter(|(_, value)| **value > 0.0).map(|(at, value)| {
            let height = (value * HEIGHT / highest).max(LOWEST);
            Column {
                x: format!("{:.1}", at as f64 * room),
                y: format!("{:.1}", HEIGHT - height),
                width: format!("{width:.1}"),
                height: format!("{height:.1}"),
                title: format!("{}, {}", ago(at), shown(*value)),
            }
        });
        let said = format!("{name} in each of the last {hours} hours, at most {}", shown(highest));
        Spark { columns: columns.collect(), said, hours }
    }

    /// The time of the left edge.
    pub fn since(&self) -> String {
        if self.hours > 48 { format!("{} d ago", self.hours / 24) } else { format!("{} h ago", self.hours) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_hour_has_its_place_and_empty_hours_draw_nothing() {
        let spark = Spark::of("Failures", &[0.0, 4.0, 0.0, 2.0], |value| value);
        let drawn: Vec<_> = spark
            .columns
            .iter()
            .map(|one| (one.x.as_str(), one.y.as_str(), one.height.as_str(), one.title.as_str()))
            .collect();
        assert_eq!(drawn, [("60.0", "0.0", "28.0", "2 h ago, 4"), ("180.0", "14.0", "14.0", "this hour, 2")]);
        assert_eq!(spark.said, "Failures in each of the last 4 hours, at most 4");
        assert!(Spark::of("Failures", &[0.0; 24], |value| value).columns.is_empty());
        assert!(Spark::of("Failures", &[], |value| value).columns.is_empty());
        assert_eq!(Spark::of("Failures", &[0.0; 168], |value| value).since(), "7 d ago");
    }
}
