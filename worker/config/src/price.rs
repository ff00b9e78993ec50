//! The cost of a model call, computed without floats.

use wakeful_workflow::record::Usage;

/// Billionths of a dollar in a dollar.
const NANOS: i64 = 1_000_000_000;

/// Prices of one model, each in billionths of a dollar per million tokens.
///
/// Billionths can express a quarter of a micro-dollar exactly. The usual surcharge on cache writes needs
/// that.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Price {
    pub input: i64,
    /// Input read from the provider's prompt cache.
    pub cached: i64,
    /// Input written to the provider's prompt cache.
    pub cache_write: i64,
    pub output: i64,
}

impl Price {
    /// Fills in missing parts: cached input costs as much as input, and a cache write a quarter more.
    pub(super) fn of(
        input: Option<i64>,
        cached: Option<i64>,
        cache_write: Option<i64>,
        output: Option<i64>,
    ) -> Self {
        let input = input.unwrap_or(0);
        Price {
            input,
            cached: cached.unwrap_or(input),
            cache_write: cache_write.unwrap_or(input / 4 * 5 + input % 4 * 5 / 4),
            output: output.unwrap_or(0),
        }
    }

    /// The cost of one call in millionths of a dollar, rounded half up once at the end.
    ///
    /// `usage.input_tokens` is all input, including cache reads and cache writes. Contradictory counts never
    /// give a negative cost.
    pub fn cost_micros(&self, usage: &Usage) -> i64 {
        let tokens = |count: i64| i128::from(count.max(0));
        let (cached, written) = (tokens(usage.cached_tokens), tokens(usage.cache_write_tokens));
        let plain = (tokens(usage.input_tokens) - cached - written).max(0);
        // Tokens × dollars per million = micro-dollars; prices are in billionths, so the sum is in billionths
        // of micro-dollars.
        let nano_micros = plain * i128::from(self.input)
            + cached * i128::from(self.cached)
            + written * i128::from(self.cache_write)
            + tokens(usage.output_tokens) * i128::from(self.output);
        i64::try_from((nano_micros + i128::from(NANOS / 2)) / i128::from(NANOS)).unwrap_or(i64::MAX)
    }
}

/// The rule of [`parse_usd`], for error messages.
pub(super) const USD_RULE: &str =
    "must be US dollars per million tokens from 0 to 1000000 with at most 6 decimal places, such as 0.25";

/// Parses a decimal number of dollars into billionths.
pub(super) fn parse_usd(text: &str) -> Option<i64> {
    let text = text.strip_prefix('+').unwrap_or(text);
    let (whole, fraction) = text.split_once('.').unwrap_or((text, "0"));
    let digits = |part: &str, most: usize| {
        (1..=most).contains(&part.len()) && part.bytes().all(|b| b.is_ascii_digit())
    };
    if !digits(whole, 7) || !digits(fraction, 6) {
        return None;
    }
    let nanos = whole.parse::<i64>().ok()? * NANOS + format!("{fraction:0<9}").parse::<i64>().ok()?;
    (nanos <= 1_000_000 * NANOS).then_some(nanos)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn usage(input: i64, cached: i64, written: i64, output: i64) -> Usage {
        Usage {
            input_tokens: input,
            output_tokens: output,
            cached_tokens: cached,
            cache_write_tokens: written,
            cost_micros: 0,
        }
    }

    fn usd(text: &str) -> Option<i64> {
        Some(parse_usd(text).unwrap())
    }

    #[test]
    fn a_call_costs_the_sum_of_its_parts() {
        let price = Price::of(usd("3"), usd("0.3"), None, usd("15"));
        assert_eq!(price.cost_micros(&usage(1_000, 0, 0, 100)), 3_000 + 1_500);
        assert_eq!(price.cost_micros(&usage(1_000, 600, 0, 0)), 400 * 3 + 180);
        assert_eq!(price.cost_micros(&usage(1_000, 0, 1_000, 0)), 3_750);
        assert_eq!(price.cost_micros(&usage(0, 0, 0, 0)), 0);
    }

    #[test]
    fn half_a_micro_is_rounded_up_and_less_is_rounded_down() {
        let price = Price::of(usd("0.1"), None, None, usd("0.25"));
        assert_eq!(price.cost_micros(&usage(5, 0, 0, 0)), 1);
        assert_eq!(price.cost_micros(&usage(4, 0, 0, 0)), 0);
        // 0.4 and 0.25: rounded separately, both would be zero.
        assert_eq!(price.cost_micros(&usage(4, 0, 0, 1)), 1);
    }

    #[test]
    fn a_cache_write_costs_a_quarter_more_exactly() {
        assert_eq!(Price::of(usd("0.000001"), None, None, None).cache_write, 1_250);
        assert_eq!(Price::of(usd("3"), None, usd("9"), None).cache_write, 9_000_000_000);
    }

    #[test]
    fn contradicting_or_huge_counts_stay_within_bounds() {
        let price = Price::of(usd("1000000"), None, None, usd("1000000"));
        assert_eq!(price.cost_micros(&usage(i64::MAX, 0, 0, i64::MAX)), i64::MAX);
        assert_eq!(price.cost_micros(&usage(-5, 0, 0, -5)), 0);
        assert_eq!(Price::default().cost_micros(&usage(10, 0, 0, 10)), 0);
    }

    #[test]
    fn dollars_are_read_as_decimals() {
        assert_eq!(parse_usd("0.1"), Some(100_000_000));
        assert_eq!(parse_usd("0.000001"), Some(1_000));
        assert_eq!(parse_usd("15"), Some(15 * NANOS));
        for bad in ["", "-1", "1.", ".5", "1e3", "nan", "inf", "0.0000001", "1000001", "1,5", "$3"] {
            assert_eq!(parse_usd(bad), None, "{bad}");
        }
    }
}
