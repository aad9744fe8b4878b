//! Configuration tables given as words of a command line.

use anyhow::Result;
use config::disk_kinds;
use config::options::Spec;
use config::usage_error::UsageError;
use control::api::DiskKind;
use serde_json::{Map, Value, json};
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

macro_rules! table_of_kind {
    (
        { $disk:ident, $words:ident }
        $($(#[$doc:meta])* $kind:ident($spec:ident), $list:ident;)*
    ) => {
        match $disk {
            $(DiskKind::$kind => disk_of::<config::disk::$spec>($words),)*
        }
    };
}

/// Parses words into the table of a disk of this kind.
///
/// # Errors
/// As [`table`]; or a usage error when the disk has no volume, too many volumes, or lacks a key.
pub fn disk(kind: DiskKind, words: &[String]) -> Result<Map<String, Value>> {
    disk_kinds!(table_of_kind kind, words)
}

fn disk_of<S: Spec>(words: &[String]) -> Result<Map<String, Value>> {
    let (mut table, volumes) = table::<S>(words)?;
    match volumes.as_slice() {
        [] => {
            return Err(UsageError::error(
                "the disk has no volume: name a path or URL",
            ));
        }
        volumes if !S::NESTED.is_empty() => {
            let namespaces = volumes.iter().map(|volume| json!({ "volume": volume }));
            table.insert("namespace".to_owned(), namespaces.collect());
        }
        [volume] => {
            table.insert("volume".to_owned(), Value::from(volume.as_str()));
        }
        [..] => {
            return Err(UsageError::error(
                "only a controller or a subsystem has several volumes",
            ));
        }
    }
    let mut required = S::ROWS.iter().filter(|row| row.required);
    if let Some(row) = required.find(|row| !table.contains_key(row.key)) {
        let key = row.key;
        let example = match key {
            "socket" => "/run/vnvme/vm0.sock",
            "listen" => "127.0.0.1:4420",
            _ => row.form,
        };
        return Err(UsageError::error(format!(
            "the disk has no {key}: add {key}=..., for example {key}={example}"
        )));
    }
    Ok(table)
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
