//! Tables of the configuration, as words of a command line.

use crate::options::Spec;
use crate::usage::Usage;
use anyhow::Result;
use serde_json::{Map, Value};
use std::path::Path;

/// `key`, if a word is `key=value` with a key of the configuration. Else it is a volume, whose path
/// or options may have the sign, too.
fn split(word: &str) -> Option<(&str, &str)> {
    let (key, value) = word.split_once('=')?;
    let is_key = key
        .bytes()
        .all(|byte| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-');
    (is_key && !key.is_empty()).then_some((key, value))
}

/// The keys of a table of the configuration.
pub fn keys<S: Spec>() -> Vec<&'static str> {
    let nested = S::NESTED.iter().map(|(key, _)| *key);
    S::ROWS.iter().map(|row| row.key).chain(nested).collect()
}

/// The key that was meant by a word that would else be taken for a volume: `io_queues=9`.
fn meant(word: &str, keys: &[&'static str]) -> Option<&'static str> {
    let (key, _) = word.split_once('=')?;
    let is_word = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_');
    match key.bytes().all(is_word) && !Path::new(word).exists() {
        true => volume::similar(key, keys.iter().copied()),
        false => None,
    }
}

/// A value as a configuration file has it: what reads as a number or a truth value there is one.
fn value(text: &str) -> Value {
    match (text, text.parse::<i64>()) {
        ("true" | "on", _) => true.into(),
        ("false" | "off", _) => false.into(),
        (_, Ok(number)) => number.into(),
        _ => text.into(),
    }
}

/// Reads words: a table of those with a key, and the volumes. `keys` are those of the table.
///
/// # Errors
/// A key is said twice, or looks like a volume.
pub fn table(words: &[String], keys: &[&'static str]) -> Result<(Map<String, Value>, Vec<String>)> {
    let (mut table, mut volumes) = (Map::new(), Vec::new());
    for word in words {
        let Some((key, text)) = split(word) else {
            if let Some(key) = meant(word, keys) {
                let value = word.split_once('=').map_or("", |(_, value)| value);
                return Err(Usage::error(format!(
                    "{word} is no key with its value, did you mean {key}={value}? (A volume of \
                     that name is written ./{word})"
                )));
            }
            volumes.push(word.clone());
            continue;
        };
        if table.insert(key.to_owned(), value(text)).is_some() {
            return Err(Usage::error(format!("{key} is said twice")));
        }
    }
    Ok((table, volumes))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_with_a_key_are_a_table_and_others_volumes() {
        let words = [
            "socket=/run/a=b",
            "nsid=7",
            "read-only=on",
            "/d/a.raw?iops=5",
            "A=b",
            "=x",
        ];
        let keys = ["socket", "io-queues"];
        let (table, volumes) = super::table(&words.map(Into::into), &keys).unwrap();
        let wanted = serde_json::json!({"socket": "/run/a=b", "nsid": 7, "read-only": true});
        assert_eq!(Value::Object(table), wanted);
        assert_eq!(volumes, ["/d/a.raw?iops=5", "A=b", "=x"]);
        assert!(super::table(&["a=1".into(), "a=2".into()], &keys).is_err());
        for (word, meant) in [
            ("io_queues=9", "io-queues=9?"),
            ("IO-Queues=9", "io-queues=9?"),
            ("Sokcet=/run/a", "socket=/run/a?"),
        ] {
            let error = super::table(&[word.into()], &keys).unwrap_err().to_string();
            assert!(error.contains(meant), "{error}");
        }
    }
}
