//! Values of options, and the fields that hold them.

use crate::access::{Principal, SocketMode};
use crate::ana::AnaState;
use crate::choices::{IdentityRule, KeeperMode, PathChoice, SandboxMode, Spread};
use crate::error_policy::{OnReadError, OnWriteError};
use crate::spec::DoorbellMode;
use clap::ValueEnum;
use clap::builder::PossibleValue;
use controller::Cloud;
use rustix::thread::CpuSet;
use serde::de::DeserializeOwned;
use std::ffi::OsStr;
use std::fmt;
use std::net::SocketAddr;
use std::ops::Deref;
use std::path::PathBuf;
use std::str::FromStr;
use worker::IdleWindow;

/// Type that the value of an option can have.
pub trait Value: Sized + fmt::Debug {
    /// Whether a flag of this type has no value and is only present or absent.
    const IS_SWITCH: bool = false;
    /// Whether a flag of this type may be repeated, so that the values are joined by commas.
    const IS_LIST: bool = false;

    /// Parses text from the command line or a URL.
    ///
    /// # Errors
    /// A text for the user when the value is invalid.
    fn from_text(text: &OsStr) -> Result<Self, String>;

    /// Parses a value from a configuration file.
    ///
    /// # Errors
    /// A text for the user when the value is invalid.
    fn from_toml(value: toml::Value) -> Result<Self, String>;

    /// Returns the value as it is written in a configuration file.
    fn to_toml(&self) -> toml::Value;

    /// Returns the words that the value may be, if the type is an enumeration.
    fn choices() -> Vec<PossibleValue> {
        Vec::new()
    }
}

/// Field that an option sets, independent of its type.
pub trait Setting {
    /// Returns whether the option is not set.
    fn is_empty(&self) -> bool;
    /// Parses the value from the command line, see `Value::from_text`.
    ///
    /// # Errors
    /// The text is invalid.
    fn set_text(&mut self, text: &OsStr) -> Result<(), String>;
    /// Parses the value from a configuration file, see `Value::from_toml`.
    ///
    /// # Errors
    /// The value is invalid.
    fn set_toml(&mut self, value: toml::Value) -> Result<(), String>;
    /// Returns the value as in a configuration file; `None` if the option is not set.
    fn to_toml(&self) -> Option<toml::Value>;
    /// Formats the value for comparison in tests.
    #[cfg(test)]
    fn shown(&self) -> String {
        String::new()
    }
    /// See `Value::IS_SWITCH`.
    fn is_switch(&self) -> bool {
        false
    }
    /// See `Value::IS_LIST`.
    fn is_list(&self) -> bool {
        false
    }
    /// See `Value::choices`.
    fn choices(&self) -> Vec<PossibleValue> {
        Vec::new()
    }
}

impl<V: Value> Setting for Option<V> {
    fn is_empty(&self) -> bool {
        self.is_none()
    }

    fn set_text(&mut self, text: &OsStr) -> Result<(), String> {
        *self = Some(V::from_text(text)?);
        Ok(())
    }

    fn set_toml(&mut self, value: toml::Value) -> Result<(), String> {
        *self = Some(V::from_toml(value)?);
        Ok(())
    }

    fn to_toml(&self) -> Option<toml::Value> {
        self.as_ref().map(V::to_toml)
    }

    #[cfg(test)]
    fn shown(&self) -> String {
        format!("{self:?}")
    }

    fn is_switch(&self) -> bool {
        V::IS_SWITCH
    }

    fn is_list(&self) -> bool {
        V::IS_LIST
    }

    fn choices(&self) -> Vec<PossibleValue> {
        V::choices()
    }
}

/// Path that must be given.
impl Setting for PathBuf {
    fn is_empty(&self) -> bool {
        self.as_os_str().is_empty()
    }

    fn set_text(&mut self, text: &OsStr) -> Result<(), String> {
        *self = text.into();
        Ok(())
    }

    fn set_toml(&mut self, value: toml::Value) -> Result<(), String> {
        *self = plain(value)?;
        Ok(())
    }

    fn to_toml(&self) -> Option<toml::Value> {
        Some(text(self.to_string_lossy()))
    }
}

/// Path or URL of a volume. In a configuration file also a table of the URL and its options, `{ url
/// = "a.raw", iops = 1000 }`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Url(pub String);

impl Deref for Url {
    type Target = str;

    fn deref(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for Url {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl Setting for Url {
    fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    fn set_text(&mut self, text: &OsStr) -> Result<(), String> {
        self.0 = utf8(text)?.to_owned();
        Ok(())
    }

    fn set_toml(&mut self, value: toml::Value) -> Result<(), String> {
        let mut table = match value {
            toml::Value::String(url) => {
                self.0 = url;
                return Ok(());
            }
            toml::Value::Table(table) => table,
            other => return Err(format!("{other} is not a path, a URL or a table")),
        };
        let Some(toml::Value::String(mut url)) = table.remove("url") else {
            return Err("the table has no url".into());
        };
        for (key, value) in table {
            let value = match value {
                toml::Value::String(text) => text.replace('%', "%25").replace('&', "%26"),
                toml::Value::Boolean(true) => "on".into(),
                toml::Value::Boolean(false) => "off".into(),
                toml::Value::Integer(number) => number.to_string(),
                other => {
                    return Err(format!(
                        "{key} = {other}: neither text, a number nor true or false"
                    ));
                }
            };
            let sign = if url.contains('?') { '&' } else { '?' };
            url.push_str(&format!("{sign}{key}={value}"));
        }
        self.0 = url;
        Ok(())
    }

    fn to_toml(&self) -> Option<toml::Value> {
        Some(text(&*self.0))
    }
}

fn text(text: impl Into<String>) -> toml::Value {
    toml::Value::String(text.into())
}

fn utf8(text: &OsStr) -> Result<&str, String> {
    text.to_str().ok_or_else(|| "it is not UTF-8".into())
}

fn plain<T: DeserializeOwned>(value: toml::Value) -> Result<T, String> {
    let number_or_switch = match &value {
        toml::Value::Integer(number) => Some(number.to_string()),
        toml::Value::Float(number) => Some(number.to_string()),
        toml::Value::Boolean(switch) => Some(switch.to_string()),
        _ => None,
    };
    T::deserialize(value).map_err(|error| match number_or_switch {
        // The kinds of text are "a string" and "path string".
        Some(value) if error.message().ends_with("string") => {
            format!("{value} is not text; write \"{value}\" with quotation marks")
        }
        _ => error.message().to_owned(),
    })
}

fn parsed<T: FromStr<Err: fmt::Display>>(text: &OsStr) -> Result<T, String> {
    utf8(text)?
        .parse()
        .map_err(|error: T::Err| error.to_string())
}

/// Implements [`Value`] for types that the standard library and serde parse.
macro_rules! plain_values {
    ($($value:ty),*) => {$(
        impl Value for $value {
            fn from_text(text: &OsStr) -> Result<Self, String> {
                parsed(text)
            }

            fn from_toml(value: toml::Value) -> Result<Self, String> {
                plain(value)
            }

            fn to_toml(&self) -> toml::Value {
                text(self.clone())
            }
        }
    )*};
}

plain_values!(String);

/// Numbers; the error for a number out of range has clap's wording.
macro_rules! numbers {
    ($($value:ty),*) => {$(
        impl Value for $value {
            fn from_text(text: &OsStr) -> Result<Self, String> {
                volume::parse_number::<Self, 0, { Self::MAX as u64 }>(utf8(text)?)
            }

            fn from_toml(value: toml::Value) -> Result<Self, String> {
                if let toml::Value::String(text) = &value {
                    let number = volume::parse_number::<Self, 0, { Self::MAX as u64 }>(text);
                    let number = number.map_err(|why| format!("\"{text}\": {why}"))?;
                    return Err(format!("\"{text}\": write {number} without quotation marks"));
                }
                plain(value)
            }

            fn to_toml(&self) -> toml::Value {
                toml::Value::Integer((*self).into())
            }
        }
    )*};
}

numbers!(u8, u16, u32);

/// Implements [`Value`] for enumerations of words.
macro_rules! choices {
    ($($value:ty),*) => {$(
        impl Value for $value {
            fn from_text(text: &OsStr) -> Result<Self, String> {
                let choice = <$value>::from_str(utf8(text)?, false);
                choice.map_err(|_| {
                    let shown = Self::choices().into_iter().filter(|c| !c.is_hide_set());
                    let names: Vec<String> = shown.map(|c| c.get_name().to_owned()).collect();
                    format!("{} is expected", names.join(" or "))
                })
            }

            fn from_toml(value: toml::Value) -> Result<Self, String> {
                plain(value)
            }

            fn to_toml(&self) -> toml::Value {
                let value = self.to_possible_value();
                text(value.as_ref().map_or("", |value| value.get_name()))
            }

            fn choices() -> Vec<PossibleValue> {
                let all = Self::value_variants().iter();
                all.filter_map(ValueEnum::to_possible_value).collect()
            }
        }
    )*};
}

choices!(
    AnaState,
    DoorbellMode,
    IdentityRule,
    KeeperMode,
    OnReadError,
    OnWriteError,
    PathChoice,
    SandboxMode,
    Spread
);

impl Value for PathBuf {
    fn from_text(text: &OsStr) -> Result<Self, String> {
        Ok(text.into())
    }

    fn from_toml(value: toml::Value) -> Result<Self, String> {
        plain(value)
    }

    fn to_toml(&self) -> toml::Value {
        text(self.to_string_lossy())
    }
}

/// Value that is a list of folders, or of words that stand for some.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Paths(pub Vec<PathBuf>);

impl Value for Paths {
    const IS_LIST: bool = true;

    fn from_text(text: &OsStr) -> Result<Self, String> {
        let paths = utf8(text)?.split(',').map(PathBuf::from);
        Ok(Self(paths.collect()))
    }

    fn from_toml(value: toml::Value) -> Result<Self, String> {
        plain(value).map(Self)
    }

    fn to_toml(&self) -> toml::Value {
        let paths = self.0.iter().map(Value::to_toml);
        toml::Value::Array(paths.collect())
    }
}

/// Value that is a list of host names.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Names(pub Vec<String>);

impl Value for Names {
    const IS_LIST: bool = true;

    fn from_text(text: &OsStr) -> Result<Self, String> {
        let names = utf8(text)?.split(',').map(str::to_owned);
        Ok(Self(names.collect()))
    }

    fn from_toml(value: toml::Value) -> Result<Self, String> {
        plain(value).map(Self)
    }

    fn to_toml(&self) -> toml::Value {
        let names = self.0.iter().cloned().map(toml::Value::String);
        toml::Value::Array(names.collect())
    }
}

impl Value for SocketAddr {
    fn from_text(text: &OsStr) -> Result<Self, String> {
        let parsed = utf8(text)?.parse();
        parsed.map_err(|_| {
            "an IP address and a port are expected, like 127.0.0.1:9469 or [::1]:9469".into()
        })
    }

    fn from_toml(value: toml::Value) -> Result<Self, String> {
        Self::from_text(OsStr::new(&plain::<String>(value)?))
    }

    fn to_toml(&self) -> toml::Value {
        text(self.to_string())
    }
}

impl Value for Cloud {
    fn from_text(text: &OsStr) -> Result<Self, String> {
        parsed(text)
    }

    fn from_toml(value: toml::Value) -> Result<Self, String> {
        Self::from_text(OsStr::new(&plain::<String>(value)?))
    }

    fn to_toml(&self) -> toml::Value {
        text(self.to_string())
    }
}

/// Switch: on or off, in a configuration file also true or false.
impl Value for bool {
    const IS_SWITCH: bool = true;

    fn from_text(text: &OsStr) -> Result<Self, String> {
        match text.to_str() {
            Some("on") => Ok(true),
            Some("off") => Ok(false),
            _ => Err("on or off is expected".into()),
        }
    }

    fn from_toml(value: toml::Value) -> Result<Self, String> {
        match value {
            toml::Value::Boolean(on) => Ok(on),
            toml::Value::String(text) => Self::from_text(OsStr::new(&text)),
            other => Err(format!("{other}: true or false is expected")),
        }
    }

    fn to_toml(&self) -> toml::Value {
        toml::Value::Boolean(*self)
    }
}

/// Value that is a number of bytes, optionally with a unit: `512G`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Size(pub u64);

impl Value for Size {
    fn from_text(text: &OsStr) -> Result<Self, String> {
        Ok(Size(volume::parse_size(utf8(text)?)?))
    }

    fn from_toml(value: toml::Value) -> Result<Self, String> {
        match value {
            toml::Value::String(text) => Self::from_text(OsStr::new(&text)),
            toml::Value::Integer(number) => Self::from_text(OsStr::new(&number.to_string())),
            other => Err(format!("{other} is not a number of bytes")),
        }
    }

    fn to_toml(&self) -> toml::Value {
        i64::try_from(self.0).map_or_else(|_| text(self.0.to_string()), toml::Value::Integer)
    }
}

/// Value that is a bit mask: `0xff00`, or a decimal number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Bits(pub u64);

impl Value for Bits {
    fn from_text(text: &OsStr) -> Result<Self, String> {
        let text = utf8(text)?;
        let read = match text.strip_prefix("0x") {
            // A sign is no digit.
            Some(digits) if digits.starts_with('+') => None,
            Some(digits) => u64::from_str_radix(digits, 16).ok(),
            None => volume::parse_number::<u64, 0, { u64::MAX }>(text).ok(),
        };
        let wrong = || format!("{text}: bits are expected, like 0xff00, 64 at most");
        read.map(Self).ok_or_else(wrong)
    }

    fn from_toml(value: toml::Value) -> Result<Self, String> {
        match value {
            toml::Value::String(text) => Self::from_text(OsStr::new(&text)),
            toml::Value::Integer(number) => Self::from_text(OsStr::new(&number.to_string())),
            other => Err(format!("{other}: bits are expected, like 0xff00")),
        }
    }

    fn to_toml(&self) -> toml::Value {
        text(format!("{:#x}", self.0))
    }
}

/// List of CPU numbers: `2,3`, or `0-3,8` as in cpuset(7). In a configuration file also `[2, 3]`.
impl Value for Vec<usize> {
    const IS_LIST: bool = true;

    fn from_text(text: &OsStr) -> Result<Self, String> {
        let mut cpus = Vec::new();
        for part in utf8(text)?.split(',').map(str::trim) {
            let wrong = || format!("\"{part}\" is neither a CPU's number nor a range like 0-3");
            let number = |text: &str| text.parse::<usize>().map_err(|_| wrong());
            let (first, last) = match part.split_once('-') {
                Some((first, last)) => (number(first)?, number(last)?),
                None => (number(part)?, number(part)?),
            };
            // The bound is checked before the list is made: the last CPU may be any number.
            if last >= CpuSet::MAX_CPU {
                return Err(format!("there is no CPU {last}"));
            }
            if last < first {
                return Err(format!("the range {part} ends before it begins"));
            }
            cpus.extend(first..=last);
        }
        Ok(cpus)
    }

    fn from_toml(value: toml::Value) -> Result<Self, String> {
        let item = |value: &toml::Value| match value {
            toml::Value::Integer(number) => Ok(number.to_string()),
            toml::Value::String(text) => Ok(text.clone()),
            other => Err(format!(
                "{other} is neither a CPU's number nor a range like \"0-3\""
            )),
        };
        let text = match &value {
            toml::Value::Array(items) if items.is_empty() => return Ok(Vec::new()),
            toml::Value::Array(items) => {
                let items = items.iter().map(item).collect::<Result<Vec<_>, _>>()?;
                items.join(",")
            }
            one => item(one)?,
        };
        Self::from_text(OsStr::new(&text))
    }

    fn to_toml(&self) -> toml::Value {
        let numbers = self.iter().map(|number| i64::try_from(*number));
        let numbers = numbers.map(|number| toml::Value::Integer(number.unwrap_or(i64::MAX)));
        toml::Value::Array(numbers.collect())
    }
}

/// Users and groups, by name or number.
impl Value for Principal {
    fn from_text(text: &OsStr) -> Result<Self, String> {
        parsed(text)
    }

    fn from_toml(value: toml::Value) -> Result<Self, String> {
        match value {
            toml::Value::String(text) => parsed(OsStr::new(&text)),
            toml::Value::Integer(number) => parsed(OsStr::new(&number.to_string())),
            other => Err(format!("{other}: a name or a number is expected")),
        }
    }

    fn to_toml(&self) -> toml::Value {
        text(self.to_string())
    }
}

impl Value for SocketMode {
    fn from_text(text: &OsStr) -> Result<Self, String> {
        parsed(text)
    }

    fn from_toml(value: toml::Value) -> Result<Self, String> {
        match value {
            toml::Value::String(text) => parsed(OsStr::new(&text)),
            // 660 would be another mode than "660", and 0660 is no number of TOML's.
            other => Err(format!("{other}: a mode is text, such as \"0660\"")),
        }
    }

    fn to_toml(&self) -> toml::Value {
        text(self.to_string())
    }
}

impl Value for IdleWindow {
    fn from_text(text: &OsStr) -> Result<Self, String> {
        parsed(text)
    }

    fn from_toml(value: toml::Value) -> Result<Self, String> {
        match value {
            toml::Value::String(text) => parsed(OsStr::new(&text)),
            toml::Value::Integer(number) => parsed(OsStr::new(&number.to_string())),
            other => Err(format!(
                "{other} is neither auto nor a number of microseconds"
            )),
        }
    }

    fn to_toml(&self) -> toml::Value {
        match self {
            IdleWindow::Adaptive => text("auto"),
            IdleWindow::Fixed(time) => {
                let micros = i64::try_from(time.as_micros());
                toml::Value::Integer(micros.unwrap_or(i64::MAX))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bit_masks_are_parsed() {
        let read = |text: &str| Bits::from_text(OsStr::new(text)).ok();
        for (text, bits) in [
            ("0xff00", Some(0xff00)),
            ("65280", Some(0xff00)),
            ("0xFFFFFFFFFFFFFFFF", Some(u64::MAX)),
            ("0x10000000000000000", None),
            ("0x", None),
            ("0x+1", None),
            ("-1", None),
            ("ff", None),
            ("", None),
        ] {
            assert_eq!(read(text), bits.map(Bits), "{text}");
        }
        let all = Bits(u64::MAX);
        assert_eq!(Bits::from_toml(all.to_toml()), Ok(all));
        assert_eq!(Bits::from_toml(toml::Value::Integer(6)), Ok(Bits(6)));
        assert!(Bits::from_toml(toml::Value::Integer(-6)).is_err());
        assert!(Bits::from_toml(toml::Value::Boolean(true)).is_err());
    }

    fn cpus(text: &str) -> Result<Vec<usize>, String> {
        Vec::<usize>::from_text(OsStr::new(text))
    }

    #[test]
    fn cpu_lists_are_parsed() {
        for (text, wanted) in [
            ("2,3", &[2, 3][..]),
            ("0-3", &[0, 1, 2, 3]),
            ("0-1, 8,4-4", &[0, 1, 8, 4]),
        ] {
            assert_eq!(cpus(text).as_deref(), Ok(wanted), "{text}");
        }
        for (text, words) in [
            ("", "neither a CPU's number"),
            ("1-", "\"1-\" is neither"),
            ("-1", "neither"),
            ("1,two", "\"two\""),
            ("3-0", "ends before it begins"),
            ("0-99999999999999", "no CPU 99999999999999"),
            ("1-2-3", "neither"),
        ] {
            let why = cpus(text).unwrap_err();
            assert!(why.contains(words), "{text}: {why}");
        }
        for (text, wanted) in [
            ("[2, 3]", &[2, 3][..]),
            ("\"0-2\"", &[0, 1, 2]),
            ("[\"0-1\", 5]", &[0, 1, 5]),
            ("4", &[4]),
            ("[]", &[]),
        ] {
            let table: toml::Table = format!("cpus = {text}").parse().unwrap();
            let found = Vec::<usize>::from_toml(table["cpus"].clone());
            assert_eq!(found.as_deref(), Ok(wanted), "{text}");
        }
    }
}
