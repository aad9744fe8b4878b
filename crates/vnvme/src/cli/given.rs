//! Configuration tables given as words of a command line.

use crate::options::Spec;
use crate::usage_error::UsageError;
use anyhow::Result;
use serde_json::{Map, Value};
use std::path::Path;

/// Splits `key=value` if `key` may be a key of the configuration. Any other word is a volume: its
/// path or options may contain the sign, too.
fn split(word: &str) -> Option<(&str, &str)> {
    let (key, value) = word.split_once('=')?;
    let is_key = key
        .bytes()
        .all(|byte| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-');
    (is_key && !key.is_empty()).then_some((key, value))
}

/// Returns the keys of a configuration table.
pub fn keys<S: Spec>() -> Vec<&'static str> {
    let nested = S::NESTED.iter().map(|(key, _)| *key);
    S::ROWS.iter().map(|row| row.key).chain(nested).collect()
}

/// Returns the key that was probably meant by a word that would otherwise be a volume:
/// `io_queues=9`.
fn meant(word: &str, keys: &[&'static str]) -> Option<&'static str> {
    let (key, _) = word.split_once('=')?;
    let is_word = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_');
    if key.bytes().all(is_word) && !Path::new(word).exists() {
        volume::similar(key, keys.iter().copied())
    } else {
        None
    }
}

/// Converts a value to its form in a configuration file: numbers and booleans are recognised.
fn value(text: &str) -> Value {
    match (text, text.parse::<i64>()) {
        ("true" | "on", _) => true.into(),
        ("false" | "off", _) => false.into(),
        (_, Ok(number)) => number.into(),
        _ => text.into(),
    }
}

/// Parses words into a table of those with a key, and a list of volumes. `keys` are the keys of the
/// table.
///
/// # Errors
/// A usage error when a key is repeated, or when a misspelt key looks like a volume.
pub fn table(words: &[String], keys: &[&'static str]) -> Result<(Map<String, Value>, Vec<String>)> {
    let (mut table, mut volumes) = (Map::new(), Vec::new());
    for word in words {
        let Some((key, text)) = split(word) else {
            if let Some(key) = meant(word, keys) {
                let value = word.split_once('=').map_or("", |(_, value)| value);
                return Err(UsageError::error(format!(
                    "{word}: unknown key, did you mean {key}={value}? (Write ./{word} for a \
                     volume of that name.)"
                )));
            }
            volumes.push(word.clone());
            continue;
        };
        if table.insert(key.to_owned(), value(text)).is_some() {
            return Err(UsageError::error(format!("{key} is given twice")));
        }
    }
    Ok((table, volumes))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_with_key_become_table_and_others_volumes() {
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
