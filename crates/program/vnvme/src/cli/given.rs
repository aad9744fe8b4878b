//! Configuration tables given as words of a command line.

use anyhow::Result;
use config::options::Spec;
use config::usage_error::UsageError;
use serde_json::{Map, Value};
use std::ffi::OsStr;
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

/// Converts the value of a key to its form in a configuration file, by the type of the key: a name
/// of digits is text, and a number is a number. The running process refuses unknown keys.
fn value<S: Spec>(key: &str, text: &str) -> Result<Value> {
    let Some(row) = S::row(key) else {
        return Ok(text.into());
    };
    let mut spec = S::default();
    let set = row.set_text(&mut spec, OsStr::new(text));
    set.map_err(|why| UsageError::error(format!("{key}={text}: {why}")))?;
    Ok(serde_json::to_value(row.to_toml(&mut spec))?)
}

/// Parses words into a table of those with a key of `S`, and a list of volumes.
///
/// # Errors
/// A usage error when a key is repeated or its value is invalid, or when a misspelt key looks like
/// a volume.
pub fn table<S: Spec>(words: &[String]) -> Result<(Map<String, Value>, Vec<String>)> {
    let nested = S::NESTED.iter().map(|(key, _)| *key);
    let keys: Vec<_> = S::ROWS.iter().map(|row| row.key).chain(nested).collect();
    let (mut table, mut volumes) = (Map::new(), Vec::new());
    for word in words {
        let Some((key, text)) = split(word) else {
            if let Some(key) = meant(word, &keys) {
                let value = word.split_once('=').map_or("", |(_, value)| value);
                return Err(UsageError::error(format!(
                    "{word}: unknown key, did you mean {key}={value}? (Write ./{word} for a \
                     volume of that name.)"
                )));
            }
            volumes.push(word.clone());
            continue;
        };
        if table
            .insert(key.to_owned(), value::<S>(key, text)?)
            .is_some()
        {
            return Err(UsageError::error(format!("{key} is given twice")));
        }
    }
    Ok((table, volumes))
}

#[cfg(test)]
mod tests {
    use super::*;
    use config::spec::{ControllerSpec, NamespaceSpec};

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
        let (table, volumes) = super::table::<NamespaceSpec>(&words.map(Into::into)).unwrap();
        let wanted = serde_json::json!({"socket": "/run/a=b", "nsid": 7, "read-only": true});
        assert_eq!(Value::Object(table), wanted);
        assert_eq!(volumes, ["/d/a.raw?iops=5", "A=b", "=x"]);
        let twice = ["serial=1".into(), "serial=2".into()];
        assert!(super::table::<ControllerSpec>(&twice).is_err());
        for (word, meant) in [
            ("io_queues=9", "io-queues=9?"),
            ("IO-Queues=9", "io-queues=9?"),
            ("Sokcet=/run/a", "socket=/run/a?"),
        ] {
            let error = super::table::<ControllerSpec>(&[word.into()]);
            let error = error.unwrap_err().to_string();
            assert!(error.contains(meant), "{error}");
        }
    }

    #[test]
    fn values_have_type_of_their_key() {
        let words = [
            "name=5",
            "serial=007",
            "socket-mode=0600",
            "socket-group=36",
            "io-queues=2",
            "write-cache=off",
        ];
        let (table, _) = super::table::<ControllerSpec>(&words.map(Into::into)).unwrap();
        let wanted = serde_json::json!({
            "name": "5", "serial": "007", "socket-mode": "0600", "socket-group": "36",
            "io-queues": 2, "write-cache": false,
        });
        assert_eq!(Value::Object(table), wanted);
        let wrong = super::table::<ControllerSpec>(&["io-queues=many".into()]);
        let wrong = wrong.unwrap_err().to_string();
        assert!(
            wrong.starts_with("io-queues=many: a whole number"),
            "{wrong}"
        );
    }
}
