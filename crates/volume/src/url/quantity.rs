//! Sizes and durations as people write them.

use std::time::Duration;

/// A size in bytes: a whole number with an optional unit. `K`, `M`, `G`, `T`, `P` (and `KiB`,
/// `MiB`, ...) are powers of 1024; `KB`, `MB`, ... powers of 1000; no unit or `B`: bytes. The case
/// of the letters does not matter.
///
/// The error says what is wrong with the text.
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

/// A number of requests, as [`parse_size`] reads it: `20k` is 20480.
///
/// The error says what is wrong with the text.
pub fn parse_count(text: &str) -> Result<u64, &'static str> {
    match text.starts_with(|c: char| c.is_ascii_digit()) {
        true => parse_size(text),
        false => {
            Err("a number of requests per second is expected, such as 5000, or 0 for no limit")
        }
    }
}

/// A duration: a number, which may have a decimal point, and one of the units `ns`, `us`, `ms`,
/// `s`.
///
/// The error says what is wrong with the text.
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
    fn sizes() {
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
    fn durations() {
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
