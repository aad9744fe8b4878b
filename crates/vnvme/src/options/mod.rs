//! Options, each in one place: a row of a table.
//!
//! There is a table for each kind of thing that is configured (a controller, a namespace, an
//! export, a block device, the process), in [`tables`]. A row has the option's key in the
//! configuration file, its flags on the command line, whether a volume's URL may say it,
//! what its value looks like, its default, its help, and the field that it sets. Of the rows
//! are made: the commands' flags and their `--help` ([`flags`]), what a configuration file
//! may say ([`mod@file`]), what a URL may say ([`url`]), and docs/reference.md and the man
//! pages (`reference`, a test).

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

/// A command whose flags come from the tables.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Command {
    /// `vnvme serve`
    Serve,
    /// `vnvme ublk`
    Ublk,
    /// `vnvme daemon`: the process's of `vnvme serve`, and its own.
    Daemon,
}

/// What a flag does beside `--config`, where the file (or a volume's URL) says the same.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Beside {
    /// It is for what says nothing itself.
    Default,
    /// It counts more than the file.
    Overrides,
    /// It is refused beside a file, for this reason.
    Refused(&'static str),
}

/// An option on the command line.
#[derive(Clone, Copy, Debug)]
pub struct Flag {
    /// Without the dashes. With `no-` before the row's key it switches off.
    pub name: &'static str,
    /// The letter that stands for it.
    pub short: Option<char>,
    /// What it does beside `--config`.
    pub beside: Beside,
    /// Another flag that has to be there.
    pub requires: Option<&'static str>,
    /// Its help, where it is not the row's.
    pub help: Option<&'static str>,
}

impl Flag {
    const fn new(name: &'static str, beside: Beside) -> Self {
        Self {
            name,
            short: None,
            beside,
            requires: None,
            help: None,
        }
    }

    /// [`Beside::Default`].
    pub const fn default(name: &'static str) -> Self {
        Self::new(name, Beside::Default)
    }

    /// [`Beside::Overrides`].
    pub const fn overrides(name: &'static str) -> Self {
        Self::new(name, Beside::Overrides)
    }

    /// [`Beside::Refused`].
    pub const fn refused(name: &'static str, why: &'static str) -> Self {
        Self::new(name, Beside::Refused(why))
    }

    /// With a letter.
    pub const fn short(self, short: char) -> Self {
        Self {
            short: Some(short),
            ..self
        }
    }

    /// Only with another flag.
    pub const fn requires(self, other: &'static str) -> Self {
        Self {
            requires: Some(other),
            ..self
        }
    }

    /// With a help of its own.
    pub const fn help(self, help: &'static str) -> Self {
        Self {
            help: Some(help),
            ..self
        }
    }
}

/// An option of an `S`.
pub struct Row<S: 'static> {
    /// Its key in the file, and in a URL.
    pub key: &'static str,
    /// What its value looks like: alternatives (`on|off`), or the kind of value in capitals.
    pub form: &'static str,
    /// What it is for: begins with a small letter, so that it may stand in a sentence.
    pub help: &'static str,
    /// What counts when nothing is said; empty: nothing does.
    pub default: &'static str,
    /// The field.
    pub setting: fn(&mut S) -> &mut dyn Setting,
    /// The file must say it.
    pub required: bool,
    /// A volume's URL may say it.
    pub url: bool,
    /// Numbers outside are refused.
    pub range: Option<(u32, u32)>,
    /// The flag of `vnvme serve`.
    pub serve: Option<Flag>,
    /// The flag of `vnvme ublk`.
    pub ublk: Option<Flag>,
    /// The flag of `vnvme daemon`, where `vnvme serve` has none.
    pub daemon: Option<Flag>,
}

impl<S> Row<S> {
    /// An option that only the file says.
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

    /// What counts when nothing is said.
    pub const fn or(self, default: &'static str) -> Self {
        Self { default, ..self }
    }

    /// The file must say it.
    pub const fn required(self) -> Self {
        Self {
            required: true,
            ..self
        }
    }

    /// A volume's URL may say it, too.
    pub const fn in_url(self) -> Self {
        Self { url: true, ..self }
    }

    /// A number from `first` to `last`.
    pub const fn range(self, first: u32, last: u32) -> Self {
        Self {
            range: Some((first, last)),
            ..self
        }
    }

    /// A flag of `vnvme serve`.
    pub const fn serve(self, flag: Flag) -> Self {
        Self {
            serve: Some(flag),
            ..self
        }
    }

    /// A flag of `vnvme ublk`.
    pub const fn ublk(self, flag: Flag) -> Self {
        Self {
            ublk: Some(flag),
            ..self
        }
    }

    /// A flag of `vnvme daemon` alone.
    pub const fn daemon(self, flag: Flag) -> Self {
        Self {
            daemon: Some(flag),
            ..self
        }
    }

    /// The flag of a command.
    pub fn flag(&self, command: Command) -> Option<&Flag> {
        match command {
            Command::Serve => self.serve.as_ref(),
            Command::Ublk => self.ublk.as_ref(),
            Command::Daemon => self.daemon.as_ref().or(self.serve.as_ref()),
        }
    }

    /// The help with the default: `[default: ...]`.
    pub fn help_with_default(&self) -> String {
        match self.default {
            "" => self.help.to_owned(),
            default => format!("{} [default: {default}]", self.help),
        }
    }

    /// Sets the field to what the command line or a URL says.
    ///
    /// # Errors
    /// What is wrong with the text, in words.
    pub fn set_text(&self, spec: &mut S, text: &OsStr) -> Result<(), String> {
        if let Some(number) = text.to_str().and_then(|text| text.parse().ok()) {
            self.check_range(number)?;
        }
        (self.setting)(spec).set_text(text)
    }

    /// What a configuration file says for the field; nothing where nothing was said.
    pub fn to_toml(&self, spec: &mut S) -> Option<toml::Value> {
        (self.setting)(spec).to_toml()
    }

    /// Sets the field to what a configuration file says.
    ///
    /// # Errors
    /// What is wrong with the value, in words.
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

/// Something that is configured: a table of the configuration file.
pub trait Spec: Default + 'static {
    /// The table's name, as the file has it: `[[controller]]`.
    const TABLE: &'static str;
    /// What a user calls several of them.
    const NAMES: &'static str;
    /// Its options.
    const ROWS: &'static [Row<Self>];
    /// Keys of tables within it, and whether each must be there; see [`Spec::nested`].
    const NESTED: &'static [(&'static str, bool)] = &[];
    /// Flags that cannot do to it what they say, and why: they are refused.
    const REFUSED: &'static [(&'static str, &'static str)] = &[];
    /// Flags of the process that concern nothing else than these.
    const OF_PROCESS: &'static [&'static str] = &[];

    /// Reads the table within it that has this key.
    ///
    /// # Errors
    /// What the file says cannot be read.
    fn nested<'de, A: serde::de::MapAccess<'de>>(
        &mut self,
        _key: &str,
        _map: &mut A,
    ) -> Result<(), A::Error> {
        Ok(())
    }

    /// Its volume, if it has one: what a URL may say is taken from it.
    fn volume(&mut self) -> Option<&mut Url> {
        None
    }

    /// The row of a key.
    fn row(key: &str) -> Option<&'static Row<Self>> {
        Self::ROWS.iter().find(|row| row.key == key)
    }
}
