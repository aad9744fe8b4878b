//! Registry of the kinds of volumes that a URL can name: their syntax, texts for help and errors,
//! and the functions that open them.

use super::{Encryption, Extras, OpenError, OpenOptions, Options, scheme};
use crate::{FileVolume, Volume};
use std::path::Path;
use std::sync::Arc;

/// Option that a volume's URL may have, written `name=value`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct UrlOption {
    /// Key of the option, the part before the `=`.
    pub name: &'static str,
    /// Form of the value, as in help texts: alternatives (`on|off`), or the kind of value in
    /// capitals (`SIZE`, `DURATION`, `N`, `NAME`, `GUID`).
    pub form: &'static str,
    /// Purpose of the option, as help texts describe it.
    pub help: &'static str,
}

impl UrlOption {
    /// Creates the option `name=form` with its help text.
    pub const fn new(name: &'static str, form: &'static str, help: &'static str) -> Self {
        Self { name, form, help }
    }
}

/// URL option to refuse writes, which every kind of volume accepts.
pub const READ_ONLY: UrlOption = UrlOption::new("read-only", "on|off", "refuse writes");

/// URL syntax of one kind of volume, and texts that describe it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Scheme {
    /// Text before `://`. A name that ends in `+` is a prefix to the URL of another volume.
    pub name: &'static str,
    /// Form of the text after `://`, for error messages, such as `SIZE`.
    pub form: &'static str,
    /// Example URLs of this kind of volume, for help texts.
    pub example: &'static str,
    /// Description of this kind of volume, for help texts.
    pub help: &'static str,
    /// Options of this kind of volume, in addition to those of [`Extras`] and [`READ_ONLY`].
    pub options: &'static [UrlOption],
}

impl Scheme {
    /// Returns the form of the URL for error messages: `mem://SIZE`, or `controller+URL` for a
    /// prefix.
    pub fn url(&self) -> String {
        if self.is_prefix() {
            format!("{}{}", self.name, self.form)
        } else {
            format!("{}://{}", self.name, self.form)
        }
    }

    /// Returns whether the scheme is a prefix to the URL of another volume, which has its own
    /// options. The name of such a scheme ends in `+`.
    pub fn is_prefix(&self) -> bool {
        self.name.ends_with('+')
    }
}

/// Function that opens a volume of one kind from its URL.
pub type OpenKind<X> =
    Box<dyn Fn(&mut VolumeUrl<'_>, OpenOptions) -> Result<BareVolume<X>, OpenError> + Send + Sync>;

/// Function that opens an encrypted volume over the volume that has its container.
pub type OpenEncrypted = Box<
    dyn Fn(Arc<dyn Volume>, &Encryption, &OpenOptions) -> Result<Arc<dyn Volume>, OpenError>
        + Send
        + Sync,
>;

/// A kind of volume: its URL syntax and the function that opens it.
pub struct VolumeKind<X = ()> {
    /// Syntax of the kind's URLs.
    pub scheme: Scheme,
    /// Function that opens a volume. It must use every given option, otherwise the URL is refused.
    pub open: OpenKind<X>,
}

impl<X> VolumeKind<X> {
    /// Creates a kind of volumes that `open` opens.
    pub fn new(
        scheme: Scheme,
        open: impl Fn(&mut VolumeUrl<'_>, OpenOptions) -> Result<BareVolume<X>, OpenError>
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

/// A parsed URL of a known scheme, as passed to the function that opens the volume.
#[derive(Debug)]
pub struct VolumeUrl<'a> {
    text: &'a str,
    /// Text of the URL between `://` and the options; for a path, from the beginning.
    pub name: &'a str,
    /// Options of the URL that are specific to the kind of volume.
    pub options: Options,
}

impl VolumeUrl<'_> {
    /// Returns the part of the URL before `://`; empty for a path.
    pub fn scheme(&self) -> &str {
        scheme(self.text).0
    }

    /// Returns the whole URL without the options of [`Extras`], for kinds that parse it and its
    /// options themselves. Marks all options as used.
    pub fn take_text(&mut self) -> &str {
        self.options = Options::none();
        self.text
    }
}

/// A newly opened volume before the options of [`Extras`] are applied, with the program's own data
/// for it.
pub struct BareVolume<X = ()> {
    pub(super) volume: Arc<dyn Volume>,
    /// File to be locked, if the volume is a file or block device.
    pub(super) to_lock: Option<Arc<FileVolume>>,
    pub(super) attached: Option<X>,
}

impl<X> BareVolume<X> {
    /// Creates the result of a kind's open function, without additional data.
    pub fn new(volume: Arc<dyn Volume>) -> Self {
        Self {
            volume,
            to_lock: None,
            attached: None,
        }
    }

    /// Creates the result of a kind's open function, with the program's own data for the volume.
    pub fn attached(volume: Arc<dyn Volume>, attached: X) -> Self {
        Self {
            attached: Some(attached),
            ..Self::new(volume)
        }
    }
}

/// Volume that was opened from a URL, with the options of the URL.
pub struct OpenedUrl<X = ()> {
    /// Opened volume, with all options of the URL applied.
    pub volume: Arc<dyn Volume>,
    /// Options of [`Extras`] in the URL, which `volume` already applies.
    pub extras: Extras,
    /// Data of the program for the volume, from the function that opened it.
    pub attached: Option<X>,
}

/// Kinds of volumes that a program can open: those of this crate, and those that it adds.
///
/// # To add a kind of volume
///
/// 1. Write a module with the kind's [`Scheme`] (its options, their help), and a function that
///    opens it; `url/mem.rs` is an example.
/// 2. Add the kind in one line: in `kinds` of `url/mod.rs` (which also names the module) when it
///    belongs to this crate, else by [`Registry::with`] in the program.
///
/// Errors that list schemes or options, and `vnvme serve --help`, then include it.
///
/// `X` is the program's own data for each volume.
pub struct Registry<X = ()> {
    kinds: Vec<VolumeKind<X>>,
    /// Schemes of the kinds of volumes that are also file formats.
    formats: Vec<&'static str>,
    /// Function that opens encrypted volumes; `None` where they are refused.
    encrypted: Option<OpenEncrypted>,
}

impl<X: 'static> Default for Registry<X> {
    fn default() -> Self {
        Self::new()
    }
}

impl<X: 'static> Registry<X> {
    /// Creates a registry with the kinds of volumes of this crate.
    pub fn new() -> Self {
        Self {
            kinds: super::kinds(),
            formats: Vec::new(),
            encrypted: None,
        }
    }

    /// Sets the function that opens encrypted volumes ([`Extras::encryption`]).
    pub fn with_encryption(mut self, open: OpenEncrypted) -> Self {
        self.encrypted = Some(open);
        self
    }

    /// Adds a kind of volumes that are files of a certain format. Its volumes can be named
    /// `PATH?format=NAME` and `file://PATH?format=NAME` as well as `NAME://PATH`.
    pub fn with_format(mut self, kind: VolumeKind<X>) -> Self {
        self.formats.push(kind.scheme.name);
        self.with(kind)
    }

    /// Adds a kind of volume, or replaces the kind with the same scheme.
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
    /// A path is used literally when a file of exactly this name exists, even with a `?` in it. In
    /// `file://` URLs, bytes can be written as `%` and two hexadecimal digits.
    ///
    /// # Errors
    /// [`OpenError`] when the URL is invalid or the volume cannot be opened.
    pub fn open(&self, url: &str, open: OpenOptions) -> Result<OpenedUrl<X>, OpenError> {
        self.open_any(url, open).map_err(|error| error.of(url))
    }

    fn open_any(&self, url: &str, open: OpenOptions) -> Result<OpenedUrl<X>, OpenError> {
        let (is_check, incoming) = (open.is_check, open.incoming);
        let options = open.clone();
        let (whole, extras) = if scheme(url).0.is_empty() && Path::new(url).exists() {
            let whole = super::file(url.into(), open, &mut Options::none())?;
            (whole, Extras::default())
        } else {
            let (rest, extras) = Extras::split(url)?;
            (self.open_whole(&rest, open)?, extras)
        };
        let decrypt = |volume, encryption: &Encryption| match &self.encrypted {
            Some(open_encrypted) => open_encrypted(volume, encryption, &options),
            None => Err(OpenError::Value {
                key: "luks".into(),
                value: encryption.key.clone(),
                why: "encrypted volumes are not possible here",
            }),
        };
        let volume = extras.apply(whole.volume, url, decrypt)?;
        // Locked only now that its used part is known; volumes of this process, which have names,
        // were checked first.
        if incoming && volume.extent().is_none() {
            return Err(OpenError::Incoming {
                why: "lock=off leaves it to the user to exclude a second writer",
            });
        }
        if let (Some(file), Some(part), false) = (whole.to_lock, volume.extent(), is_check) {
            if incoming {
                file.lock_later(part.offset, part.len);
                ensure_lock(&*volume)?;
            } else {
                file.lock(part.offset, part.len)?;
            }
        }
        Ok(OpenedUrl {
            volume,
            extras,
            attached: whole.attached,
        })
    }

    fn open_whole(&self, text: &str, open: OpenOptions) -> Result<BareVolume<X>, OpenError> {
        let mut prefixes = self.kinds.iter().filter(|kind| kind.scheme.is_prefix());
        let is_lockless = || OpenError::Incoming {
            why: "only a raw file has a lock that decides which process may write it",
        };
        if let Some(kind) = prefixes.find(|kind| text.starts_with(kind.scheme.name)) {
            if open.incoming {
                return Err(is_lockless());
            }
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
        if scheme.is_empty()
            && let Some(meant) = self.with_slashes(text)
        {
            return Err(OpenError::NoSlashes {
                text: text.into(),
                meant,
            });
        }
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
        if open.incoming && kind_name != super::FILE.name {
            return Err(is_lockless());
        }
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

    /// Returns the URL that was meant by a path that does not exist and looks like a URL without
    /// slashes: `mem:4G`.
    fn with_slashes(&self, text: &str) -> Option<String> {
        let (name, rest) = text.split_once(':')?;
        let mut schemes = self.schemes();
        schemes.find(|scheme| scheme.name.eq_ignore_ascii_case(name))?;
        let path = text.split_once('?').map_or(text, |(path, _)| path);
        if Path::new(path).exists() {
            return None;
        }
        Some(format!("{}://{rest}", name.to_ascii_lowercase()))
    }

    /// Returns the file format that a query names, if it is a registered kind, and the rest of the
    /// query.
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

    /// Returns the forms of all URLs that the registry knows, for error messages.
    fn known(&self) -> String {
        let schemes = self.schemes().map(Scheme::url);
        schemes.collect::<Vec<_>>().join(", ")
    }
}

/// Returns an error unless the volume has a lock that another process can hand over.
fn ensure_lock(volume: &dyn Volume) -> Result<(), OpenError> {
    let why = match volume.file_lock() {
        Some(_) => return Ok(()),
        None if volume.info().read_only => "it is read-only: both sides can open it as it is",
        None => "it is not a regular file",
    };
    Err(OpenError::Incoming { why })
}
