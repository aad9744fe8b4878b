//! Parsing of sizes, counts and durations.

use std::time::Duration;

/// Parses a size in bytes: a whole number with an optional unit. `K`, `M`, `G`, `T`, `P` (and
/// `KiB`, `MiB`, ...) are powers of 1024; `KB`, `MB`, ... powers of 1000; no unit or `B`: bytes.
/// Upper and lower case are equivalent.
///
/// The error describes the mistake in the text.
pub fn parse_size(text: &str) -> Result<u64, &'static str> {
    let digits = text
        .find(|c: char| !c.is_ascii_digit())
        .unwrap_or(text.len());
    let (number, unit) = text.split_at(digits);
    if number.is_empty() {
        return Err("a size begins with a whole number, such as 512M, 1G or 64KiB");
    }
    let number: u64 = number.parse().map_err(|_| "the number is too large")?;
    let unit = unit.to_ascii_lowercase();
    let (prefix, base) = match unit.as_str() {
        "" | "b" => return Ok(number),
        _ if unit.ends_with("ib") => (unit.trim_end_matches("ib"), 1024u64),
        _ if unit.ends_with('b') => (unit.trim_end_matches('b'), 1000),
        _ => (unit.as_str(), 1024),
    };
    let power = match prefix {
        "k" => 1,
        "m" => 2,
        "g" => 3,
        "t" => 4,
        "p" => 5,
        _ => {
            return Err(
                "the unit is unknown; known are K, M, G, T, P (powers of 1024), KiB, ..., and KB, ... (1000)",
            );
        }
    };
    number
        .checked_mul(base.pow(power))
        .ok_or("the number is too large")
}

/// Parses a number of requests, whose units `k`, `M` and `G` are powers of 1000, unlike those of a
/// size: `20k` is 20000.
///
/// The error describes the mistake in the text.
pub fn parse_count(text: &str) -> Result<u64, &'static str> {
    const EXPECTED: &str =
        "a number of requests per second is expected, such as 5000 or 5k, or 0 for no limit";
    let digits = text.trim_end_matches(|c: char| !c.is_ascii_digit());
    let factor = match text.get(digits.len()..) {
        Some("") => 1,
        Some("k" | "K") => 1_000,
        Some("m" | "M") => 1_000_000,
        Some("g" | "G") => 1_000_000_000,
        _ => return Err(EXPECTED),
    };
    if digits.is_empty() || !digits.bytes().all(|byte| byte.is_ascii_digit()) {
        return Err(EXPECTED);
    }
    let number = digits.parse::<u64>().ok();
    let number = number.and_then(|number| number.checked_mul(factor));
    number.ok_or("the number is too large")
}

/// Parses a whole number from `FIRST` to `LAST`.
///
/// # Errors
/// A description of the mistake in the text.
pub fn parse_number<T: TryFrom<u64>, const FIRST: u64, const LAST: u64>(
    text: &str,
) -> Result<T, String> {
    let digits = text.strip_prefix('-').unwrap_or(text);
    if digits.is_empty() || !digits.bytes().all(|byte| byte.is_ascii_digit()) {
        let unit = parse_size(text).ok();
        let without = unit.map_or(String::new(), |number| format!(" without a unit, {number}"));
        return Err(format!("a whole number is expected{without}"));
    }
    let number = text.parse().ok();
    let number = number.filter(|number| (FIRST..=LAST).contains(number));
    let number = number.and_then(|number| T::try_from(number).ok());
    number.ok_or_else(|| match LAST {
        u64::MAX => format!("{text} is not a number from {FIRST} on"),
        last => format!("{text} is not in {FIRST}..={last}"),
    })
}

/// Parses a duration: a number, optionally with decimals, and one of the units `ns`, `us`, `ms`,
/// `s`.
///
/// The error describes the mistake in the text.
pub fn parse_duration(text: &str) -> Result<Duration, &'static str> {
    let end = text
        .find(|c: char| !(c.is_ascii_digit() || c == '.'))
        .unwrap_or(text.len());
    let (number, unit) = text.split_at(end);
    let number: f64 = number
        .parse()
        .map_err(|_| "a duration begins with a number, such as 6.4us or 100ns")?;
    let second = match unit {
        "ns" => 1e9,
        "us" | "µs" => 1e6,
        "ms" => 1e3,
        "s" => 1.0,
        "" => return Err("the unit is missing: ns, us, ms or s"),
        _ => return Err("the unit is unknown; known are ns, us, ms and s"),
    };
    Duration::try_from_secs_f64(number / second).map_err(|_| "the duration is too long")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_parsed() {
        assert_eq!(parse_number::<u8, 1, 64>("64"), Ok(64));
        assert_eq!(parse_number::<u64, 0, { u64::MAX }>("0"), Ok(0));
        for (text, why) in [
            ("", "a whole number is expected"),
            ("first", "a whole number is expected"),
            ("-", "a whole number is expected"),
            ("+1", "a whole number is expected"),
            ("1.5", "a whole number is expected"),
            ("1K", "a whole number is expected without a unit, 1024"),
            ("-1", "-1 is not in 1..=64"),
            ("65", "65 is not in 1..=64"),
            (
                "99999999999999999999",
                "99999999999999999999 is not in 1..=64",
            ),
        ] {
            assert_eq!(parse_number::<u8, 1, 64>(text), Err(why.into()), "{text}");
        }
        let wrong = parse_number::<u64, 1, { u64::MAX }>("0");
        assert_eq!(wrong, Err("0 is not a number from 1 on".into()));
    }

    #[test]
    fn sizes_are_parsed() {
        for (text, bytes) in [
            ("0", 0),
            ("512", 512),
            ("512b", 512),
            ("4k", 4096),
            ("64KiB", 65536),
            ("64kib", 65536),
            ("512M", 512 << 20),
            ("1G", 1 << 30),
            ("1GB", 1_000_000_000),
            ("1T", 1 << 40),
            ("2PiB", 2 << 50),
            ("18446744073709551615", u64::MAX),
        ] {
            assert_eq!(parse_size(text), Ok(bytes), "{text}");
        }
        for text in [
            "",
            "G",
            "-1",
            "1.5G",
            "1X",
            "1 G",
            "1GiBB",
            "1ib",
            "16384P",
            "99999999999999999999",
        ] {
            assert!(parse_size(text).is_err(), "{text}");
        }
    }

    #[test]
    fn counts_have_decimal_units() {
        for (text, count) in [
            ("0", 0),
            ("5000", 5000),
            ("1k", 1000),
            ("20K", 20_000),
            ("3M", 3_000_000),
            ("1g", 1_000_000_000),
        ] {
            assert_eq!(parse_count(text), Ok(count), "{text}");
        }
        for text in ["", "k", "-1", "fast", "1KiB", "1kb", "1 k", "1.5k", "1k5"] {
            let why = parse_count(text).unwrap_err();
            assert!(why.starts_with("a number of requests"), "{text}: {why}");
        }
        assert_eq!(
            parse_count("18446744073709551615k"),
            Err("the number is too large")
        );
    }

    #[test]
    fn durations_are_parsed() {
        assert_eq!(parse_duration("6.4us"), Ok(Duration::from_nanos(6400)));
        assert_eq!(parse_duration("100ns"), Ok(Duration::from_nanos(100)));
        assert_eq!(parse_duration("2s"), Ok(Duration::from_secs(2)));
        assert_eq!(parse_duration("3ms"), Ok(Duration::from_millis(3)));
        for text in [
            "",
            "us",
            "5",
            "5m",
            "-5us",
            "1.2.3us",
            "99999999999999999999999s",
        ] {
            assert!(parse_duration(text).is_err(), "{text}");
        }
    }
}
