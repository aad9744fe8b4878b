//! Tables of the configuration, as words of a command line.

use crate::usage::Usage;
use anyhow::Result;
use serde_json::{Map, Value};

/// `key`, if a word is `key=value` with a key of the configuration. Else it is a volume, whose path
/// or options may have the sign, too.
fn split(word: &str) -> Option<(&str, &str)> {
    let (key, value) = word.split_once('=')?;
    let is_key = key
        .bytes()
        .all(|byte| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-');
    (is_key && !key.is_empty()).then_some((key, value))
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

/// Reads words: a table of those with a key, and the volumes.
///
/// # Errors
/// A key is said twice.
pub fn table(words: &[String]) -> Result<(Map<String, Value>, Vec<String>)> {
    let (mut table, mut volumes) = (Map::new(), Vec::new());
    for word in words {
        let Some((key, text)) = split(word) else {
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
        let (table, volumes) = super::table(&words.map(Into::into)).unwrap();
        let wanted = serde_json::json!({"socket": "/run/a=b", "nsid": 7, "read-only": true});
        assert_eq!(Value::Object(table), wanted);
        assert_eq!(volumes, ["/d/a.raw?iops=5", "A=b", "=x"]);
        assert!(super::table(&["a=1".into(), "a=2".into()]).is_err());
    }
}
