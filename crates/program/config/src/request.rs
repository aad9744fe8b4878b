//! Conversion of a control client's request to the tables of a configuration file.

use crate::disk::DiskSpec;
use crate::options::url;
use crate::spec::NamespaceSpec;
use anyhow::{Result, anyhow};
use control::api::DiskKind;
use serde::Deserialize;
use serde_json::{Map, Value};

/// Converts a JSON value of a request to TOML. `null` means an absent key.
fn toml_of(json: Value) -> Option<toml::Value> {
    Some(match json {
        Value::Null => return None,
        Value::Bool(value) => toml::Value::Boolean(value),
        Value::String(text) => toml::Value::String(text),
        Value::Number(number) => match (number.as_i64(), number.as_f64()) {
            (Some(number), _) => toml::Value::Integer(number),
            (None, number) => toml::Value::Float(number.unwrap_or(f64::NAN)),
        },
        Value::Array(values) => {
            toml::Value::Array(values.into_iter().filter_map(toml_of).collect())
        }
        Value::Object(map) => toml::Value::Table(table_of(map)),
    })
}

/// Converts a JSON object of a request to a TOML table.
pub fn table_of(map: Map<String, Value>) -> toml::Table {
    let pairs = map.into_iter();
    pairs
        .filter_map(|(key, value)| Some((key, toml_of(value)?)))
        .collect()
}

/// Returns an error's message, which names the key. The rest of the error is for a file.
fn message(error: toml::de::Error) -> anyhow::Error {
    anyhow!("{}", error.message())
}

/// Parses the table of a namespace in a request.
///
/// # Errors
/// The table is invalid; the error is a text for the user.
pub fn namespace_of(map: Map<String, Value>) -> Result<NamespaceSpec> {
    let table = toml::Value::Table(table_of(map));
    let mut namespace = NamespaceSpec::deserialize(table).map_err(message)?;
    url::take(&mut namespace)?;
    Ok(namespace)
}

impl DiskSpec {
    /// Parses the table of a disk in a request.
    ///
    /// # Errors
    /// The table is invalid; the error is a text for the user.
    pub fn of(kind: DiskKind, map: Map<String, Value>) -> Result<Self> {
        let table = toml::Value::Table(table_of(map));
        let mut spec = Self::read(kind, table).map_err(message)?;
        spec.take_url_options()?;
        spec.complete();
        Ok(spec)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn request_accepts_keys_of_configuration_file() {
        let json = r#"{"socket": "/run/a.sock", "serial": null, "io-queues": 2,
            "namespace": [{"volume": "mem://1M"}, {"volume": {"url": "mem://1M", "nsid": 9}}]}"#;
        let map: Map<String, Value> = serde_json::from_str(json).unwrap();
        let DiskSpec::Controller(spec) = DiskSpec::of(DiskKind::Controller, map).unwrap() else {
            panic!("it is another kind");
        };
        let nsids: Vec<_> = spec.namespaces.iter().map(|ns| ns.nsid.unwrap()).collect();
        assert_eq!((nsids, spec.io_queues), (vec![1, 9], Some(2)));
        assert_eq!(spec.name.as_deref(), Some("a"));
        for (json, words) in [
            (r#"{"socket": "/a"}"#, "missing field `namespace`"),
            (
                r#"{"sokcet": "/a", "namespace": []}"#,
                "did you mean `socket`?",
            ),
            (
                r#"{"socket": "/a", "namespace": [{"volume": 7}]}"#,
                "not a path",
            ),
            (r#"{"socket": "/a", "namespace": 7}"#, "invalid type"),
            (
                r#"{"socket": 7, "namespace": []}"#,
                "socket: 7 is not text; write \"7\" with quotation marks",
            ),
            (
                r#"{"socket": "/a", "io-queues": "many", "namespace": []}"#,
                "io-queues: \"many\": a whole number is expected",
            ),
        ] {
            let map: Map<String, Value> = serde_json::from_str(json).unwrap();
            let error = DiskSpec::of(DiskKind::Controller, map).unwrap_err();
            assert!(format!("{error:#}").contains(words), "{error:#}");
        }
    }
}
