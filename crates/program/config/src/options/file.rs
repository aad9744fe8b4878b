//! Parser of configuration files: the keys of the tables, each once, and no others.

use super::{Row, Spec};
use serde::Deserialize;
use serde::de::{DeserializeSeed, Deserializer, Error, MapAccess, SeqAccess, Visitor};
use std::fmt;
use std::marker::PhantomData;

/// Reads a table of a configuration file.
///
/// # Errors
/// A key is unknown (a similar one is named), is missing, or its value cannot be read.
pub fn table<'de, S: Spec, D: Deserializer<'de>>(deserializer: D) -> Result<S, D::Error> {
    deserializer.deserialize_map(Table(PhantomData))
}

/// Reads an array of tables, `[[key]]`, of the table `within` (empty: of the file).
///
/// # Errors
/// A value of another kind: a single table, for which the error has the form of an array.
pub fn tables<'de, S: Spec + Deserialize<'de>, A: MapAccess<'de>>(
    map: &mut A,
    key: &str,
    within: &str,
) -> Result<Vec<S>, A::Error> {
    map.next_value_seed(Tables {
        name: match within.trim_matches(['[', ']']) {
            "" => key.to_owned(),
            within => format!("{within}.{key}"),
        },
        of: PhantomData,
    })
}

struct Tables<S> {
    name: String,
    of: PhantomData<S>,
}

impl<'de, S: Spec + Deserialize<'de>> DeserializeSeed<'de> for Tables<S> {
    type Value = Vec<S>;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Vec<S>, D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de, S: Spec + Deserialize<'de>> Visitor<'de> for Tables<S> {
    type Value = Vec<S>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "an array of tables, [[{}]]", self.name)
    }

    fn visit_map<A: MapAccess<'de>>(self, _: A) -> Result<Vec<S>, A::Error> {
        let name = &self.name;
        let more = if S::NESTED.is_empty() {
            String::new()
        } else {
            format!(", and [[{name}.namespace]] for its namespaces")
        };
        Err(A::Error::custom(format_args!(
            "[{name}] is one table, and there may be several; write [[{name}]] with two brackets{more}"
        )))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Vec<S>, A::Error> {
        let mut all = Vec::new();
        while let Some(one) = seq.next_element()? {
            all.push(one);
        }
        Ok(all)
    }
}

/// Visitor of the table of `spec`, without nested tables.
pub fn to_table<S: Spec + Clone>(spec: &S) -> toml::Table {
    // The rows give the fields to be set, too.
    let mut spec = spec.clone();
    let rows = S::ROWS.iter();
    let said = rows.filter_map(|row| Some((row.key.to_owned(), row.to_toml(&mut spec)?)));
    said.collect()
}

struct Table<S>(PhantomData<S>);

impl<'de, S: Spec> Visitor<'de> for Table<S> {
    type Value = S;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "a table {}", S::TABLE)
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<S, A::Error> {
        let mut spec = S::default();
        let mut seen = Vec::new();
        while let Some(key) = map.next_key_seed(Key::<S>(PhantomData))? {
            seen.push(key);
            match S::row(key) {
                Some(row) => map.next_value_seed(Field(row, &mut spec))?,
                None => spec.nested(key, &mut map)?,
            }
        }
        let rows = S::ROWS.iter().map(|row| (row.key, row.required));
        let missing = rows
            .chain(S::NESTED.iter().copied())
            .find(|(key, required)| *required && !seen.contains(key));
        match missing {
            Some((key, _)) => {
                let example = match key {
                    "namespace" => "[{ volume = \"disk.raw\" }]",
                    _ => "...",
                };
                Err(A::Error::custom(format_args!(
                    "missing field `{key}`; add {key} = {example} to the table {}",
                    S::TABLE
                )))
            }
            None => Ok(spec),
        }
    }
}

/// Key of a configuration table that is one of the known options.
struct Key<S>(PhantomData<S>);

impl<'de, S: Spec> DeserializeSeed<'de> for Key<S> {
    type Value = &'static str;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<&'static str, D::Error> {
        let text = String::deserialize(deserializer)?;
        let rows = S::ROWS.iter().map(|row| row.key);
        let keys: Vec<&'static str> = rows.chain(S::NESTED.iter().map(|(key, _)| *key)).collect();
        let known = keys.iter().find(|key| **key == text);
        known
            .copied()
            .ok_or_else(|| D::Error::custom(unknown(&text, &keys)))
    }
}

/// Value of an option, which is parsed into a field of the configuration.
struct Field<'a, S: 'static>(&'static Row<S>, &'a mut S);

impl<'de, S> DeserializeSeed<'de> for Field<'_, S> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        let value = toml::Value::deserialize(deserializer)?;
        let set = self.0.set_toml(self.1, value);
        set.map_err(|why| D::Error::custom(format_args!("{}: {why}", self.0.key)))
    }
}

/// Error text for an unknown key: the key that was probably meant, and all known keys.
fn unknown(text: &str, keys: &[&str]) -> String {
    let nearest = volume::similar(text, keys.iter().copied());
    let meant = nearest.map_or(String::new(), |key| format!(", did you mean `{key}`?"));
    let quoted: Vec<String> = keys.iter().map(|key| format!("`{key}`")).collect();
    let sign = if meant.is_empty() { "," } else { "" };
    format!(
        "unknown field `{text}`{meant}{sign} expected one of {}",
        quoted.join(", ")
    )
}

#[cfg(test)]
mod tests {
    use crate::spec::Specs;

    fn error(file: &str) -> String {
        toml::from_str::<Specs>(file).unwrap_err().to_string()
    }

    #[test]
    fn unknown_key_error_suggests_correct_key() {
        let file = "[[controller]]\nsocket = \"a\"\nserail = \"typo\"\nnamespace = []";
        let text = error(file);
        for words in [
            "line 3, column 1",
            "unknown field `serail`, did you mean `serial`? expected one of `name`, `socket`, \
             `socket-owner`",
            "`mdts`, `max-namespaces`, `pool`, `pool-capacity`, `pool-block-size`, `incoming`, \
             `namespace`",
        ] {
            assert!(text.contains(words), "{words}: {text}");
        }
        let far = error("[[controller]]\nxyzzy = \"red\"");
        assert!(
            far.contains("unknown field `xyzzy`, expected one of"),
            "{far}"
        );
        let top = error("[[contoller]]\n");
        assert!(top.contains("did you mean `controller`?"), "{top}");
        let underscore = error("[[controller]]\nio_queues = 3");
        assert!(
            underscore.contains("did you mean `io-queues`?"),
            "{underscore}"
        );
        let within = error("[[ublk]]\nvolume = \"a\"\nqueue = 1");
        assert!(within.contains("did you mean `queues`?"), "{within}");
    }

    #[test]
    fn invalid_value_error_has_location() {
        for (file, words) in [
            (
                "[[controller]]\nsocket = 1\n",
                &["line 2, column 10", "socket: 1 is not text"][..],
            ),
            (
                "[[ublk]]\nvolume = 7",
                &[
                    "line 2, column 10",
                    "volume: 7 is not a path, a URL or a table",
                ],
            ),
            (
                "[[ublk]]\nvolume = \"a\"\nqueues = 70000",
                &["line 3", "70000"],
            ),
            (
                "[[controller]]\nsocket = \"a\"\n[controller.namespace]\nvolume = \"a\"",
                &["line 3", "write [[controller.namespace]] with two brackets"],
            ),
            (
                "[controller]\nsocket = \"a\"\nnamespace = []",
                &["line 1", "write [[controller]] with two brackets"],
            ),
            (
                "[controller.namespace]\nvolume = \"a\"",
                &[
                    "line 1",
                    "write [[controller]] with two brackets, and [[controller.namespace]] for its",
                ],
            ),
            (
                "[[controller]]\nname = true\n",
                &[
                    "line 2",
                    "name: true is not text; write \"true\" with quotation marks",
                ],
            ),
            ("[[ublk]]\nqueues = 1", &["missing field `volume`"]),
            (
                "[[controller]]\nsocket = \"a\"",
                &["missing field `namespace`"],
            ),
            ("[process]\nworkers = 0", &["line 2", "0 is not in 1..=256"]),
            ("[process]\nidle-window = \"soon\"", &["line 2", "auto"]),
        ] {
            let text = error(file);
            for word in words {
                assert!(text.contains(word), "{word}: {text}");
            }
        }
    }
}
