//! Table of the kinds of volumes that a URL can name: the syntax, the texts for help and errors,
//! and the function that opens one.

use super::{Extras, OpenError, OpenOptions, Options, scheme};
use crate::{FileVolume, Volume};
use std::path::Path;
use std::sync::Arc;

/// An option of a URL, `name=value`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct UrlOption {
    /// Key of the option, before the `=`.
    pub name: &'static str,
    /// Form of the value, as in help texts: alternatives (`on|off`), or the kind of value in
    /// capitals (`SIZE`, `DURATION`, `N`, `NAME`, `GUID`).
    pub form: &'static str,
    /// Purpose of the option, for help texts.
    pub help: &'static str,
}

impl UrlOption {
    /// Creates the option `name=form` with its help text.
    pub const fn new(name: &'static str, form: &'static str, help: &'static str) -> Self {
        Self { name, form, help }
    }
}

/// The option of every kind of volume that may not be written.
pub const READ_ONLY: UrlOption = UrlOption::new("read-only", "on|off", "refuse writes");

/// Syntax and help texts of one kind of volume.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Scheme {
    /// Text before `://`; with a `+` at its end, text before the URL of another volume.
    pub name: &'static str,
    /// Form of the text behind it, as in errors: `SIZE`.
    pub form: &'static str,
    /// A URL or two, as help shows them.
    pub example: &'static str,
    /// Description of the volume, for help texts.
    pub help: &'static str,
    /// The options of this kind, beside those of [`Extras`]; [`READ_ONLY`] is always one.
    pub options: &'static [UrlOption],
}

impl Scheme {
    /// The URL, as errors show it: `mem://SIZE`; of a prefix, `controller+URL`.
    pub fn url(&self) -> String {
        match self.is_prefix() {
            true => format!("{}{}", self.name, self.form),
            false => format!("{}://{}", self.name, self.form),
        }
    }

    /// Returns whether the scheme is a prefix to the URL of another volume, which has its own
    /// options: its name ends in `+`.
    pub fn is_prefix(&self) -> bool {
        self.name.ends_with('+')
    }
}

/// Opens a volume of one kind.
pub type OpenKind<X> =
    Box<dyn Fn(&mut VolumeUrl<'_>, OpenOptions) -> Result<Whole<X>, OpenError> + Send + Sync>;

/// A kind of volume.
pub struct VolumeKind<X = ()> {
    /// Syntax of its URLs.
    pub scheme: Scheme,
    /// Function that opens it. It takes every given option, or the URL is refused.
    pub open: OpenKind<X>,
}

impl<X> VolumeKind<X> {
    /// A kind that `open` opens.
    pub fn new(
        scheme: Scheme,
        open: impl Fn(&mut VolumeUrl<'_>, OpenOptions) -> Result<Whole<X>, OpenError>
        + Send
        + Sync
        + 'static,
    ) -> Self {
        Self {
            scheme,
            open: Box::new(open),
        }
    }
}

/// A URL of a known scheme, as its kind of volume opens it.
#[derive(Debug)]
pub struct VolumeUrl<'a> {
    text: &'a str,
    /// Text between `://` (if there is one) and the options.
    pub name: &'a str,
    /// Options of the volume's kind, without those of every kind.
    pub options: Options,
}

impl VolumeUrl<'_> {
    /// Returns the text before `://`; empty for a path.
    pub fn scheme(&self) -> &str {
        scheme(self.text).0
    }

    /// The whole URL without the options that every volume has, for kinds that read it themselves,
    /// options included.
    pub fn take_text(&mut self) -> &str {
        self.options = Options::none();
        self.text
    }
}

/// A volume of one kind, before the options that every volume has; and the program's own data
/// beside the volume.
pub struct Whole<X = ()> {
    pub(super) volume: Arc<dyn Volume>,
    /// The file, if it is one, which is not locked yet.
    pub(super) to_lock: Option<Arc<FileVolume>>,
    pub(super) attached: Option<X>,
}

impl<X> Whole<X> {
    /// A volume, and nothing beside it.
    pub fn new(volume: Arc<dyn Volume>) -> Self {
        Self {
            volume,
            to_lock: None,
            attached: None,
        }
    }

    /// Creates it from a volume and the program's own data beside it.
    pub fn attached(volume: Arc<dyn Volume>, attached: X) -> Self {
        Self {
            attached: Some(attached),
            ..Self::new(volume)
        }
    }
}

/// Result of opening a URL.
pub struct Opened<X = ()> {
    /// The volume, with all that the URL asked for.
    pub volume: Arc<dyn Volume>,
    /// The options that every volume has; they are applied.
    pub extras: Extras,
    /// Data that the volume's kind keeps beside it.
    pub attached: Option<X>,
}

/// The kinds of volumes that a program knows: those of this crate, and those that it adds.
///
/// # To add a kind of volume
///
/// 1. Write a module with the kind's [`Scheme`] (its options, their help), and a function that
///    opens it; `url/mem.rs` is an example.
/// 2. Add the kind in one line: in `kinds` of `url/mod.rs` (which also names the module) when it
///    belongs to this crate, else by [`Registry::with`] in the program.
///
/// Errors that list schemes or options, and `vnvme serve --help`, know it from then on.
///
/// `X` is the program's data of a volume beside the volume itself.
pub struct Registry<X = ()> {
    kinds: Vec<VolumeKind<X>>,
    /// Kinds that are also formats of files, by their schemes' names.
    formats: Vec<&'static str>,
}

impl<X: 'static> Default for Registry<X> {
    fn default() -> Self {
        Self::new()
    }
}

impl<X: 'static> Registry<X> {
    /// The kinds of this crate.
    pub fn new() -> Self {
        Self {
            kinds: super::kinds(),
            formats: Vec::new(),
        }
    }

    /// Adds a kind of volumes that are files of a format: `PATH?format=NAME` and
    /// `file://PATH?format=NAME` name them as `NAME://PATH` does.
    pub fn with_format(mut self, kind: VolumeKind<X>) -> Self {
        self.formats.push(kind.scheme.name);
        self.with(kind)
    }

    /// Adds a kind. It replaces the one of the same scheme, if there is one.
    pub fn with(mut self, kind: VolumeKind<X>) -> Self {
        let same = |known: &&mut VolumeKind<X>| known.scheme.name == kind.scheme.name;
        match self.kinds.iter_mut().find(same) {
            Some(known) => *known = kind,
            None => self.kinds.push(kind),
        }
        self
    }

    /// Returns the schemes of all kinds.
    pub fn schemes(&self) -> impl Iterator<Item = &Scheme> {
        self.kinds.iter().map(|kind| &kind.scheme)
    }

    /// Opens the volume of `url`.
    ///
    /// A path is taken as it is when a file of that very name exists, even with a `?` in it; in
    /// `file://` URLs bytes can be written as `%` and two hexadecimal digits.
    ///
    /// # Errors
    /// [`OpenError`].
    pub fn open(&self, url: &str, open: OpenOptions) -> Result<Opened<X>, OpenError> {
        self.open_any(url, open).map_err(|error| error.of(url))
    }

    fn open_any(&self, url: &str, open: OpenOptions) -> Result<Opened<X>, OpenError> {
        let (whole, extras) = if scheme(url).0.is_empty() && Path::new(url).exists() {
            let whole = super::file(url.into(), open, &mut Options::none())?;
            (whole, Extras::default())
        } else {
            let (rest, extras) = Extras::split(url)?;
            (self.open_whole(&rest, open)?, extras)
        };
        let volume = extras.apply(whole.volume, url)?;
        // Locked only now that its used part is known; volumes of this process, which have names,
        // were checked first.
        if let (Some(file), Some(part)) = (whole.to_lock, volume.extent()) {
            file.lock(part.offset, part.len)?;
        }
        Ok(Opened {
            volume,
            extras,
            attached: whole.attached,
        })
    }

    fn open_whole(&self, text: &str, open: OpenOptions) -> Result<Whole<X>, OpenError> {
        let mut prefixes = self.kinds.iter().filter(|kind| kind.scheme.is_prefix());
        if let Some(kind) = prefixes.find(|kind| text.starts_with(kind.scheme.name)) {
            let mut url = VolumeUrl {
                text,
                name: text.strip_prefix(kind.scheme.name).unwrap_or(text),
                options: Options::none(),
            };
            return (kind.open)(&mut url, open);
        }
        let (scheme, rest) = scheme(text);
        let (name, query) = match rest.rsplit_once('?') {
            Some((name, query)) => (name, Some(query)),
            None => (rest, None),
        };
        if name.is_empty() && matches!(scheme, "" | "file") {
            return Err(OpenError::Nothing {
                known: self.known(),
            });
        }
        let mut kinds = self.kinds.iter();
        let format = match scheme {
            "" | "file" => query.and_then(|query| self.format(query)),
            _ => None,
        };
        let wanted = match (&format, scheme) {
            (Some((format, _)), _) => format,
            (None, "") => "file",
            (None, scheme) => scheme,
        };
        let Some(kind) = kinds.find(|kind| kind.scheme.name == wanted) else {
            return Err(OpenError::Scheme {
                scheme: scheme.into(),
                known: self.known(),
            });
        };
        let kind_name = kind.scheme.name;
        let rest = format.map(|(_, rest)| rest);
        let query = rest.as_deref().or(query);
        let options = Options::parse(kind_name, query, kind.scheme.options)?;
        let mut url = VolumeUrl {
            text,
            name,
            options,
        };
        let whole = (kind.open)(&mut url, open)?;
        url.options.all_taken(kind_name)?;
        Ok(whole)
    }

    /// The format that a query names, if it is a kind of volume, and the rest of the query.
    fn format(&self, query: &str) -> Option<(&'static str, String)> {
        let (named, rest): (Vec<&str>, Vec<&str>) = query
            .split('&')
            .partition(|text| text.starts_with("format="));
        let &[only] = named.as_slice() else {
            return None;
        };
        let name = only.strip_prefix("format=")?;
        let known = self.formats.iter().find(|known| **known == name)?;
        Some((known, rest.join("&")))
    }

    /// The schemes, for errors.
    fn known(&self) -> String {
        let schemes = self.schemes().map(Scheme::url);
        schemes.collect::<Vec<_>>().join(", ")
    }
}
