//! Options, each defined once as a row of a table.
//!
//! Each kind of configured thing (controller, namespace, export, block device, process) has a table
//! in [`tables`]. A row has the option's key in the configuration file, its flags on the command
//! line, whether a volume's URL accepts it, the form of its value, its default, its help, and the
//! field that it sets. The rows generate the flags of commands with their `--help` ([`flags`]), the
//! parser of configuration files ([`mod@file`]), the options of URLs ([`url`]), and
//! docs/reference.md with the man pages (`reference`, a test).

pub mod file;
pub mod flags;
#[cfg(test)]
mod reference;
pub mod tables;
pub mod url;
mod value;

pub use value::{Bits, Names, Paths, Setting, Size, Url};

use std::ffi::OsStr;
use std::ops::RangeInclusive;

/// Command with flags from the tables.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Command {
    /// `vnvme serve`
    Serve,
    /// `vnvme ublk`
    Ublk,
    /// `vnvme daemon`: the process options of `vnvme serve`, and options of its own.
    Daemon,
}

/// Relation of a flag to `--config`, when the file (or a volume's URL) sets the option as well.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FlagEffect {
    /// The flag is the default for entries without the option.
    Default,
    /// The flag overrides the file.
    Overrides,
    /// The flag is refused beside a file, for this reason.
    Refused(&'static str),
}

/// An option on the command line.
#[derive(Clone, Copy, Debug)]
pub struct Flag {
    /// Name without the dashes. With `no-` before the row's key, the flag switches the option off.
    pub name: &'static str,
    /// Short form of the flag.
    pub short: Option<char>,
    /// Relation to `--config`.
    pub beside: FlagEffect,
    /// Another flag that this flag requires.
    pub requires: Option<&'static str>,
    /// Help text, if it differs from the row's.
    pub help: Option<&'static str>,
}

impl Flag {
    const fn new(name: &'static str, beside: FlagEffect) -> Self {
        Self {
            name,
            short: None,
            beside,
            requires: None,
            help: None,
        }
    }

    /// Makes a flag that is [`FlagEffect::Default`].
    pub const fn default(name: &'static str) -> Self {
        Self::new(name, FlagEffect::Default)
    }

    /// Makes a flag that is [`FlagEffect::Overrides`].
    pub const fn overrides(name: &'static str) -> Self {
        Self::new(name, FlagEffect::Overrides)
    }

    /// Makes a flag that is [`FlagEffect::Refused`].
    pub const fn refused(name: &'static str, why: &'static str) -> Self {
        Self::new(name, FlagEffect::Refused(why))
    }

    /// Adds a short form.
    pub const fn short(self, short: char) -> Self {
        Self {
            short: Some(short),
            ..self
        }
    }

    /// Makes the flag require another one.
    pub const fn requires(self, other: &'static str) -> Self {
        Self {
            requires: Some(other),
            ..self
        }
    }

    /// Replaces the help text.
    pub const fn help(self, help: &'static str) -> Self {
        Self {
            help: Some(help),
            ..self
        }
    }
}

/// Option of an `S`.
pub struct Row<S: 'static> {
    /// Key in the configuration file and in a URL.
    pub key: &'static str,
    /// Form of the value: alternatives (`on|off`), or the kind of value in capitals.
    pub form: &'static str,
    /// Help text; begins with a small letter, so that it may stand in a sentence.
    pub help: &'static str,
    /// Default as text; empty if there is none.
    pub default: &'static str,
    /// Returns the field that the option sets.
    pub setting: fn(&mut S) -> &mut dyn Setting,
    /// Whether the configuration file must set the option.
    pub required: bool,
    /// Whether a volume's URL may set the option.
    pub url: bool,
    /// Range of a number.
    pub range: Option<(u32, u32)>,
    /// Flag of `vnvme serve`.
    pub serve: Option<Flag>,
    /// Flag of `vnvme ublk`.
    pub ublk: Option<Flag>,
    /// Flag of `vnvme daemon`, if `vnvme serve` has none.
    pub daemon: Option<Flag>,
}

impl<S> Row<S> {
    /// Makes an option that only the configuration file can set.
    pub const fn new(
        key: &'static str,
        form: &'static str,
        help: &'static str,
        setting: fn(&mut S) -> &mut dyn Setting,
    ) -> Self {
        Self {
            key,
            form,
            help,
            default: "",
            setting,
            required: false,
            url: false,
            range: None,
            serve: None,
            ublk: None,
            daemon: None,
        }
    }

    /// Sets the text of the default.
    pub const fn or(self, default: &'static str) -> Self {
        Self { default, ..self }
    }

    /// Makes the option required in the configuration file.
    pub const fn required(self) -> Self {
        Self {
            required: true,
            ..self
        }
    }

    /// Permits the option in a volume's URL, too.
    pub const fn in_url(self) -> Self {
        Self { url: true, ..self }
    }

    /// Restricts a number to `first` to `last`.
    pub const fn range(self, first: u32, last: u32) -> Self {
        Self {
            range: Some((first, last)),
            ..self
        }
    }

    /// Adds a flag of `vnvme serve`.
    pub const fn serve(self, flag: Flag) -> Self {
        Self {
            serve: Some(flag),
            ..self
        }
    }

    /// Adds a flag of `vnvme ublk`.
    pub const fn ublk(self, flag: Flag) -> Self {
        Self {
            ublk: Some(flag),
            ..self
        }
    }

    /// Adds a flag of `vnvme daemon` alone.
    pub const fn daemon(self, flag: Flag) -> Self {
        Self {
            daemon: Some(flag),
            ..self
        }
    }

    /// Returns the flag of a command.
    pub fn flag(&self, command: Command) -> Option<&Flag> {
        match command {
            Command::Serve => self.serve.as_ref(),
            Command::Ublk => self.ublk.as_ref(),
            Command::Daemon => self.daemon.as_ref().or(self.serve.as_ref()),
        }
    }

    /// Returns the help with the default: `[default: ...]`.
    pub fn help_with_default(&self) -> String {
        match self.default {
            "" => self.help.to_owned(),
            default => format!("{} [default: {default}]", self.help),
        }
    }

    /// Sets the field from text of the command line or a URL.
    ///
    /// # Errors
    /// A text for the user when the value is invalid.
    pub fn set_text(&self, spec: &mut S, text: &OsStr) -> Result<(), String> {
        if let Some(number) = text.to_str().and_then(|text| text.parse().ok()) {
            self.check_range(number)?;
        }
        (self.setting)(spec).set_text(text)
    }

    /// Returns the field's value as in a configuration file; `None` if it is not set.
    pub fn to_toml(&self, spec: &mut S) -> Option<toml::Value> {
        (self.setting)(spec).to_toml()
    }

    /// Sets the field from a value of a configuration file.
    ///
    /// # Errors
    /// A text for the user when the value is invalid.
    pub fn set_toml(&self, spec: &mut S, value: toml::Value) -> Result<(), String> {
        if let toml::Value::Integer(number) = value {
            self.check_range(number)?;
        }
        (self.setting)(spec).set_toml(value)
    }

    fn check_range(&self, number: i64) -> Result<(), String> {
        match self.range {
            Some((first, last))
                if !RangeInclusive::new(i64::from(first), last.into()).contains(&number) =>
            {
                Err(format!("{number} is not in {first}..={last}"))
            }
            _ => Ok(()),
        }
    }
}

/// A configured thing: a table of the configuration file.
pub trait Spec: Default + 'static {
    /// Name of the table in the file: `[[controller]]`.
    const TABLE: &'static str;
    /// Plural for messages.
    const NAMES: &'static str;
    /// Options of the table.
    const ROWS: &'static [Row<Self>];
    /// Keys of nested tables, and whether each is required; see [`Spec::nested`].
    const NESTED: &'static [(&'static str, bool)] = &[];
    /// Flags that are refused for this kind, and the reason.
    const REFUSED: &'static [(&'static str, &'static str)] = &[];
    /// Flags of the process that affect only this kind.
    const PROCESS_FLAGS: &'static [&'static str] = &[];

    /// Reads the nested table with this key.
    ///
    /// # Errors
    /// The file's content is invalid.
    fn nested<'de, A: serde::de::MapAccess<'de>>(
        &mut self,
        _key: &str,
        _map: &mut A,
    ) -> Result<(), A::Error> {
        Ok(())
    }

    /// Returns the volume, if there is one, for options from its URL.
    fn volume(&mut self) -> Option<&mut Url> {
        None
    }

    /// Returns the row of a key.
    fn row(key: &str) -> Option<&'static Row<Self>> {
        Self::ROWS.iter().find(|row| row.key == key)
    }
}
