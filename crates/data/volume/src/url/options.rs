//! Options of a URL: the `key=value` pairs behind the `?`.

use super::{Extras, OpenError, OpenOptions, UrlOption, similar};

/// Options of one URL. Each is removed when it is read, so that unused ones can be refused.
#[derive(Debug)]
pub struct Options {
    pairs: Vec<(String, String)>,
}

impl Options {
    /// Creates an empty set of options.
    pub fn none() -> Self {
        Self { pairs: Vec::new() }
    }

    /// Separates the options with known keys from a query. Also returns the rest of the query
    /// unchanged.
    pub(super) fn split(query: &str, known: &[UrlOption]) -> Result<(String, Self), OpenError> {
        let (mut rest, mut own) = (Vec::new(), Vec::new());
        for text in query.split('&') {
            let key = text.split_once('=').map_or(text, |(key, _)| key);
            if known.iter().any(|option| option.name == key) {
                own.push(text);
            } else {
                rest.push(text);
            }
        }
        let options = Self::parse("any", Some(&own.join("&")), known)?;
        Ok((rest.join("&"), options))
    }

    /// Parses a query; every key must be one of `known`.
    pub(super) fn parse(
        scheme: &'static str,
        query: Option<&str>,
        known: &[UrlOption],
    ) -> Result<Self, OpenError> {
        let mut pairs: Vec<(String, String)> = Vec::new();
        for text in query
            .unwrap_or("")
            .split('&')
            .filter(|text| !text.is_empty())
        {
            let (key, value) = text
                .split_once('=')
                .ok_or_else(|| OpenError::NoValue { text: text.into() })?;
            if !known.iter().any(|option| option.name == key) {
                let known = known.iter().chain(Extras::OPTIONS);
                let names: Vec<&'static str> = known.map(|option| option.name).collect();
                return Err(OpenError::UnknownOption {
                    key: key.into(),
                    similar: similar(key, names.iter().copied()),
                    scheme,
                    known: names.join(", "),
                });
            }
            if pairs.iter().any(|(other, _)| other == key) {
                return Err(OpenError::Twice { key: key.into() });
            }
            pairs.push((key.into(), value.into()));
        }
        Ok(Self { pairs })
    }

    /// Returns an error if the URL has an option that nothing has used.
    pub(super) fn all_taken(&self, scheme: &'static str) -> Result<(), OpenError> {
        match self.pairs.first() {
            None => Ok(()),
            Some((key, _)) => Err(OpenError::NoEffect {
                key: key.clone(),
                scheme,
            }),
        }
    }

    /// Removes an option and parses its value with `read`.
    ///
    /// # Errors
    /// [`OpenError::Value`] with the error of `read`.
    pub fn take<T>(
        &mut self,
        key: &str,
        read: impl FnOnce(&str) -> Result<T, &'static str>,
    ) -> Result<Option<T>, OpenError> {
        let Some(index) = self.pairs.iter().position(|(other, _)| other == key) else {
            return Ok(None);
        };
        let (key, value) = self.pairs.swap_remove(index);
        match read(&value) {
            Ok(value) => Ok(Some(value)),
            Err(why) => Err(OpenError::Value { key, value, why }),
        }
    }

    /// Removes an option with the values `on` and `off`.
    ///
    /// # Errors
    /// [`OpenError::Value`] when the value is neither on nor off.
    pub fn switch(&mut self, key: &str) -> Result<Option<bool>, OpenError> {
        self.take(key, |text| match text {
            "on" | "true" | "yes" => Ok(true),
            "off" | "false" | "no" => Ok(false),
            _ => Err("it is on or off"),
        })
    }

    /// Returns whether the volume must not be written, as set by the URL or by `open`.
    ///
    /// # Errors
    /// [`OpenError::Value`] when the value is neither on nor off.
    pub fn read_only(&mut self, open: &OpenOptions) -> Result<bool, OpenError> {
        Ok(self.switch("read-only")?.unwrap_or(false) || open.read_only)
    }
}
