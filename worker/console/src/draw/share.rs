//! One bar that is cut into shares, each with its number.

use super::line::WIDTH;

/// The shares of a whole, side by side.
pub(crate) struct Shares {
    pub parts: Vec<Share>,
    pub whole: i64,
}

pub(crate) struct Share {
    pub class: &'static str,
    pub name: &'static str,
    pub count: i64,
    pub x: String,
    pub width: String,
}

impl Shares {
    /// Shares of `whole`, without those that are empty.
    pub fn of(whole: i64, shares: &[(&'static str, &'static str, i64)]) -> Shares {
        let unit = WIDTH / whole.max(1) as f64;
        let mut x = 0.0;
        let parts = shares.iter().filter(|(.., count)| *count > 0).map(|(class, name, count)| {
            let (begin, width) = (x, *count as f64 * unit);
            x += width;
            let (x, width) = (format!("{begin:.1}"), format!("{width:.1}"));
            Share { class, name, count: *count, x, width }
        });
        Shares { parts: parts.collect(), whole }
    }

    /// The picture in words.
    pub fn said(&self) -> String {
        let parts: Vec<String> = self.parts.iter().map(|one| format!("{} {}", one.count, one.name)).collect();
        format!("{} of {}", parts.join(", "), self.whole)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_fill_the_bar_and_empty_ones_are_left_out() {
        let shares =
            Shares::of(4, &[("good", "passed", 1), ("bad", "failed again", 0), ("room", "to do", 3)]);
        let places: Vec<_> =
            shares.parts.iter().map(|one| (one.class, one.x.as_str(), one.width.as_str())).collect();
        assert_eq!(places, [("good", "0.0", "150.0"), ("room", "150.0", "450.0")]);
        assert_eq!(shares.said(), "1 passed, 3 to do of 4");
        assert!(Shares::of(0, &[("good", "passed", 0)]).parts.is_empty());
    }
}
