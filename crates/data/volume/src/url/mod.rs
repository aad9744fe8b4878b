//! Opening of volumes by a path, or by a URL of a scheme in the [`Registry`], with options
//! `?key=value&...`.

mod extras;
mod mem;
mod null;
mod options;
mod quantity;
mod registry;

use crate::VolumeError;
use crate::{
    AtomicVolume, Direct, FileCopy, FileOptions, FileVolume, Format, MAX_ATOMIC_UNIT, Overlap,
    PreviousProcess, Volume,
};
pub use extras::{Encryption, Extras};
pub use options::Options;
pub use quantity::{parse_count, parse_duration, parse_number, parse_size};
pub use registry::{BareVolume, VolumeKind, VolumeUrl};
pub use registry::{OpenEncrypted, OpenKind, OpenedUrl, READ_ONLY, Registry, Scheme, UrlOption};
use std::ffi::OsString;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStringExt;
use std::path::PathBuf;
use std::sync::Arc;

/// Returns the kinds of volumes that this crate opens from URLs.
fn kinds<X: 'static>() -> Vec<VolumeKind<X>> {
    vec![VolumeKind::new(FILE, open_file), mem::kind(), null::kind()]
}

/// Options for opening a volume that are given beside its URL, on the command line or in the
/// configuration.
#[derive(Debug, Clone, Default)]
pub struct OpenOptions {
    /// Whether the volume must not be written. A URL can also set this, but cannot revoke it.
    pub read_only: bool,
    /// Block size in bytes that the user has chosen, if any (`block-size=` in the URL overrides
    /// it).
    pub block_size: Option<u32>,
    /// Limits of the wait for the outstanding requests of a previous process that used the file or
    /// block device.
    pub previous: PreviousProcess,
    /// Memory in which the bytes of a memory volume are stored.
    pub memory: MemoryPlace,
    /// Memory in which the key of an encrypted volume is stored.
    pub key_memory: MemoryPlace,
    /// Folder for the journals of images; `None`: images are opened without a journal.
    pub journals: Option<JournalFolder>,
    /// Whether a file that begins like an image format is served as raw anyway. Set for volumes
    /// that were served as raw before: a guest may have written their first bytes.
    pub raw: bool,
    /// Whether another process may still use the file: it is opened without its lock, which
    /// [`Volume::file_lock`] takes when that process has released it.
    pub incoming: bool,
    /// Whether the volume is opened only to find errors: without locks, and without making or
    /// changing files, since another process may be serving it.
    pub is_check: bool,
}

/// Memory in which the bytes of a memory volume, or the key of an encrypted one, are stored.
#[derive(Debug, Clone, Default)]
pub enum MemoryPlace {
    /// Private memory of this process, lost at its end.
    #[default]
    Process,
    /// New memory file, which a later process can take over ([`Volume::kept_memory`],
    /// [`Volume::kept_key`]).
    New,
    /// Memory file that an earlier process has created.
    Kept(Arc<OwnedFd>),
}

/// Folder for files in which volumes record changes that their media lack. The files are mapped and
/// never flushed: they outlive every process, and not the machine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct JournalFolder {
    /// Path of the folder, which only this user may write.
    pub path: PathBuf,
    /// Identifier of the machine's present boot, by which an older file is recognised. Zero where
    /// the folder itself does not outlive the boot. An error says why the folder cannot be used.
    pub boot: Result<[u8; 16], String>,
}

/// Reason why the volume of a URL cannot be opened.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// The URL is empty.
    #[error("no volume is named; name a path, or one of {known}")]
    Nothing {
        /// Forms of valid URLs, for the message.
        known: String,
    },
    /// The scheme, the part before `://`, is unknown.
    #[error("{scheme}:// is not a kind of volume; known are a path, {known}")]
    Scheme {
        /// Scheme in the URL, for the message.
        scheme: String,
        /// Forms of valid URLs, for the message.
        known: String,
    },
    /// A path begins with a known scheme and a colon, without the two slashes.
    #[error("{text}: no such file; did you mean {}?", .meant)]
    NoSlashes {
        /// The path as given.
        text: String,
        /// The URL that was probably meant.
        meant: String,
    },
    /// The size in the URL is invalid.
    #[error("size \"{text}\" in {scheme}://{text}: {why}")]
    Size {
        /// Scheme of the URL.
        scheme: &'static str,
        /// Size as given in the URL.
        text: String,
        /// Rule that the size violates.
        why: &'static str,
    },
    /// The path contains an incomplete `%` escape, or one for a NUL byte.
    #[error(
        "path \"{text}\": a % in a file:// URL is followed by two hexadecimal digits, and never 00"
    )]
    Escape {
        /// Path as given in the URL.
        text: String,
    },
    /// An option has no `=`.
    #[error("option \"{text}\": options are written key=value, and separated by &")]
    NoValue {
        /// Option as given in the URL.
        text: String,
    },
    /// The option is unknown for this kind of volume.
    #[error(
        "option \"{key}\" is unknown{}; {scheme} volumes have {known}",
        meant(.similar.as_deref())
    )]
    UnknownOption {
        /// Key of the unknown option.
        key: String,
        /// Valid option with a similar name, which may have been meant.
        similar: Option<&'static str>,
        /// Scheme of the URL.
        scheme: &'static str,
        /// Options that this kind of volume accepts, for the message.
        known: String,
    },
    /// The option is valid for this kind of volume but had no effect.
    #[error("option \"{key}\" has no effect on this {scheme} volume")]
    NoEffect {
        /// Key of the option without effect.
        key: String,
        /// Scheme of the URL.
        scheme: &'static str,
    },
    /// An option was given twice.
    #[error("option \"{key}\" is given twice")]
    Twice {
        /// Key of the repeated option.
        key: String,
    },
    /// The value of an option is invalid.
    #[error("option {key}={value}: {why}")]
    Value {
        /// Key of the option with an invalid value.
        key: String,
        /// Value as given in the URL.
        value: String,
        /// Rule that the value violates.
        why: &'static str,
    },
    /// The partition is selected by more than one option.
    #[error("option \"{key}\": give only one of partition, partlabel and partuuid")]
    TwoPartitions {
        /// Key of the second option that selects a partition.
        key: String,
    },
    /// The selected partition cannot be found or used.
    #[error("{name}: {error}")]
    Gpt {
        /// Path or URL of the volume.
        name: String,
        /// Reason why the partition cannot be found or used.
        error: crate::gpt::GptError,
    },
    /// The volume cannot be opened while another process still uses it ([`OpenOptions::incoming`]).
    #[error("cannot take part in a migration: {why}")]
    Incoming {
        /// Property of the volume that stands in the way.
        why: &'static str,
    },
    /// Another volume of this process serves the same bytes.
    #[error(transparent)]
    Overlap(#[from] Overlap),
    /// The volume could not be opened.
    #[error(transparent)]
    Volume(#[from] VolumeError),
    /// Error of a path or URL, with its name; the inner error does not name it.
    #[error("{url}: {why}")]
    Named {
        /// Path or URL of the volume, as given.
        url: String,
        /// Error without the name of the volume.
        why: Box<OpenError>,
    },
    /// The encrypted volume could not be opened.
    #[error(transparent)]
    Encryption(Box<dyn std::error::Error + Send + Sync>),
    /// A kind of volume added by a program could not be opened.
    #[error(transparent)]
    Other(#[from] Box<dyn std::error::Error + Send + Sync>),
}

impl OpenError {
    /// Adds the path or URL to an error whose text does not name the volume.
    fn of(self, url: &str) -> Self {
        match &self {
            Self::NoValue { .. }
            | Self::UnknownOption { .. }
            | Self::NoEffect { .. }
            | Self::Twice { .. }
            | Self::Value { .. }
            | Self::TwoPartitions { .. }
            | Self::Incoming { .. }
            | Self::Encryption(_)
            | Self::Volume(
                VolumeError::SliceRange { .. }
                | VolumeError::SliceAlignment { .. }
                | VolumeError::BlockSize { .. }
                | VolumeError::Memory { .. }
                | VolumeError::Size { .. },
            ) => Self::Named {
                url: url.into(),
                why: Box::new(self),
            },
            _ => self,
        }
    }

    /// Returns the inner error without the name of the volume.
    #[must_use]
    pub fn without_name(self) -> Self {
        match self {
            Self::Named { why, .. } => *why,
            other => other,
        }
    }
}

fn meant(similar: Option<&str>) -> String {
    similar.map_or(String::new(), |name| format!(", did you mean \"{name}\"?"))
}

/// Returns the known name that is most similar to an unknown one, if any is similar enough to have
/// been meant.
pub fn similar<'a>(text: &str, names: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    let text = text.to_ascii_lowercase().replace('_', "-");
    let distance = |name: &str| strsim::damerau_levenshtein(&text, name);
    let near = |name: &&str| distance(name) * 3 <= text.chars().count().max(3);
    let nearest = names.into_iter().min_by_key(|name| distance(name));
    nearest.filter(near)
}

const FILE: Scheme = Scheme {
    name: "file",
    form: "PATH",
    example: "disk.raw, file:///disks/a.raw",
    help: "raw file or block device; create one with: truncate -s 10G disk.raw",
    options: &[
        READ_ONLY,
        UrlOption::new(
            "direct",
            "auto|on|off",
            "bypass the page cache (direct I/O) [default: auto, if the file supports it]",
        ),
        UrlOption::new(
            "lock",
            "on|off",
            "lock the used range of the file against other processes [default: on]",
        ),
        UrlOption::new(
            "block-size",
            "SIZE",
            "smallest block of a request, a power of two from 512 to 65536",
        ),
        UrlOption::new(
            "format",
            "probe|raw",
            "file format; raw also serves a file that begins like a qcow2, VMDK or other image, \
             qcow2 is the same as qcow2://PATH [default: probe, which refuses such files]",
        ),
        UrlOption::new(
            "atomic",
            "auto|off|SIZE",
            "make writes within units of SIZE (4K to 64K) atomic, by a journal if the kernel has \
             no better way [default: auto, the units that the kernel guarantees]",
        ),
        UrlOption::new(
            "atomic-journal",
            "PATH",
            "journal of atomic writes, a file or block device [default: the volume's path and \
             .atomic if atomic= has a SIZE; with a path, atomic= is 16K unless given]",
        ),
        UrlOption::new(
            "copy",
            "off|reflink|on",
            "let the file system execute a guest's Copy between files with this option: reflink, \
             if both can share blocks; on, always [default: off, data is read and written]",
        ),
        UrlOption::new(
            "timeout",
            "DURATION",
            "time limit of a request to a file on FUSE or a network, which then fails [default: \
             none]",
        ),
    ],
};

/// Opens the volume of `url` with the kinds of this crate; see [`Registry::open`].
///
/// # Errors
/// [`OpenError`] when the URL is invalid or the volume cannot be opened.
pub fn open_url(url: &str, open: OpenOptions) -> Result<Arc<dyn Volume>, OpenError> {
    let opened = Registry::<()>::new().open(url, open)?;
    Ok(opened.volume)
}

/// Returns the file or block device that `url` names, if any: for a path, a `file://` URL, or the
/// URL of an image.
pub fn path_of_url(url: &str) -> Option<PathBuf> {
    let (scheme, rest) = scheme(url);
    // Without options the path is as it is written, whether the file exists or not.
    if scheme.is_empty() && url.contains('?') && std::path::Path::new(url).exists() {
        return Some(url.into());
    }
    let name = rest.rsplit_once('?').map_or(rest, |(name, _)| name);
    match scheme {
        "" => Some(name.into()),
        "file" | "qcow2" => unescape(name).ok(),
        _ => None,
    }
}

/// Returns the path of the journal of atomic writes, if `url` names a file with a journal.
pub fn journal_of_url(url: &str) -> Option<PathBuf> {
    let (name, query) = url.rsplit_once('?')?;
    let options = || query.split('&').filter_map(|option| option.split_once('='));
    let value = |key: &str| {
        options()
            .find(|(name, _)| *name == key)
            .map(|(_, text)| text)
    };
    let atomic = value("atomic").map(atomic).transpose().ok()?;
    match (atomic, value("atomic-journal")) {
        (Some(Atomic::Unit(_)) | None, Some(journal)) => unescape(journal).ok(),
        (Some(Atomic::Unit(_)), None) => {
            let mut path = path_of_url(name)?.into_os_string();
            path.push(".atomic");
            Some(path.into())
        }
        _ => None,
    }
}

/// Splits a URL into its scheme, which is empty for a path, and the rest.
fn scheme(url: &str) -> (&str, &str) {
    match url.split_once("://") {
        Some((scheme, rest)) if is_scheme(scheme) => (scheme, rest),
        _ => ("", url),
    }
}

fn open_file<X>(url: &mut VolumeUrl<'_>, open: OpenOptions) -> Result<BareVolume<X>, OpenError> {
    let path = path_of_name(url)?;
    file(path, open, &mut url.options)
}

/// Returns the path in a file's URL. `%` escapes are decoded only behind `://`.
///
/// # Errors
/// [`OpenError::Escape`] when a `%` escape is invalid.
pub fn path_of_name(url: &VolumeUrl<'_>) -> Result<PathBuf, OpenError> {
    match url.scheme() {
        "" => Ok(PathBuf::from(url.name)),
        _ => unescape(url.name),
    }
}

/// Returns whether `text` has the syntax of a scheme (RFC 3986, 3.1). Anything else before `://` is
/// part of a path.
fn is_scheme(text: &str) -> bool {
    text.starts_with(|c: char| c.is_ascii_alphabetic())
        && text
            .chars()
            .all(|c| c.is_ascii_alphanumeric() || matches!(c, '+' | '-' | '.'))
}

fn size(scheme: &'static str, text: &str) -> Result<u64, OpenError> {
    parse_size(text).map_err(|why| OpenError::Size {
        scheme,
        text: text.into(),
        why,
    })
}

fn file<X>(
    path: PathBuf,
    open: OpenOptions,
    options: &mut Options,
) -> Result<BareVolume<X>, OpenError> {
    let direct = |text: &str| match text {
        "auto" => Ok(Direct::Auto),
        "on" => Ok(Direct::On),
        "off" => Ok(Direct::Off),
        _ => Err("it is auto, on or off"),
    };
    let block_size =
        |text: &str| u32::try_from(parse_size(text)?).map_err(|_| "the number is too large");
    let format = |text: &str| match text {
        "raw" => Ok(Format::Raw),
        "probe" => Ok(Format::Probe),
        _ => Err("it is raw, qcow2 or probe"),
    };
    let copy = |text: &str| match text {
        "off" => Ok(FileCopy::Off),
        "reflink" => Ok(FileCopy::Reflink),
        "on" => Ok(FileCopy::On),
        _ => Err("it is off, reflink or on"),
    };
    let read_only = options.read_only(&open)?;
    let atomic = options.take("atomic", atomic)?;
    let journal = match atomic {
        Some(Atomic::Unit(_)) | None => {
            let path = |text: &str| unescape(text).map_err(|_| ESCAPE);
            options.take("atomic-journal", path)?
        }
        // The key has no effect, and is left.
        _ => None,
    };
    let atomic = atomic.unwrap_or(match journal {
        Some(_) => Atomic::Unit(DEFAULT_UNIT),
        None => Atomic::Auto,
    });
    let atomic = match atomic {
        // The journal would be made.
        Atomic::Unit(_) if open.is_check && !read_only => Atomic::Auto,
        atomic => atomic,
    };
    if open.incoming && matches!(atomic, Atomic::Unit(_)) {
        return Err(OpenError::Incoming {
            why: "the journal of atomic= is a second file; use atomic=off, or no atomic=",
        });
    }
    let file_options = FileOptions {
        format: match options.take("format", format)?.unwrap_or_default() {
            Format::Probe if open.raw => Format::Raw,
            format => format,
        },
        read_only,
        direct: options.take("direct", direct)?.unwrap_or_default(),
        lock: options.switch("lock")?.unwrap_or(true),
        block_size: options.take("block-size", block_size)?.or(open.block_size),
        previous: open.previous,
        timeout: options.take("timeout", parse_duration)?,
        image: false,
        atomic: match atomic {
            Atomic::Off => 0,
            Atomic::Auto => FileOptions::TWO_BLOCKS,
            // A file that is atomic by itself spares the journal a write.
            Atomic::Unit(unit) => unit,
        },
        copy: options.take("copy", copy)?.unwrap_or_default(),
    };
    let file = Arc::new(FileVolume::open_unlocked(&path, file_options)?);
    let volume: Arc<dyn Volume> = match atomic {
        Atomic::Unit(_) if read_only => {
            return Err(OpenError::NoEffect {
                key: "atomic".into(),
                scheme: "read-only",
            });
        }
        Atomic::Unit(unit) => {
            let beside = || {
                let mut path = path.into_os_string();
                path.push(".atomic");
                path.into()
            };
            let journal = journal.unwrap_or_else(beside);
            let (file, previous) = (file.clone(), open.previous);
            Arc::new(AtomicVolume::with_file(file, &journal, unit, previous)?)
        }
        _ => file.clone(),
    };
    Ok(BareVolume {
        to_lock: Some(file),
        ..BareVolume::new(volume)
    })
}

/// Value of the URL option `atomic=`, which selects the writes that are atomic.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Atomic {
    /// Only the writes that the kernel promises to execute atomically.
    Auto,
    Off,
    /// All writes within units of this many bytes, by a journal.
    Unit(u32),
}

fn atomic(text: &str) -> Result<Atomic, &'static str> {
    match text {
        "auto" => return Ok(Atomic::Auto),
        "off" => return Ok(Atomic::Off),
        _ => {}
    }
    let unit = parse_size(text).ok().filter(|unit| unit.is_power_of_two());
    let unit = unit.filter(|unit| (4096..=MAX_ATOMIC_UNIT.into()).contains(unit));
    let unit = unit.and_then(|unit| u32::try_from(unit).ok());
    unit.map(Atomic::Unit)
        .ok_or("it is auto, off, or a power of two from 4K to 64K")
}

/// Unit in bytes of a journal if the URL has no `atomic=`: the page size of MySQL.
const DEFAULT_UNIT: u32 = 16 << 10;
const ESCAPE: &str = "a % is followed by two hexadecimal digits";

/// Decodes the `%XX` escapes of a URL into a path.
fn unescape(text: &str) -> Result<PathBuf, OpenError> {
    let bytes = unescape_bytes(text).ok_or_else(|| OpenError::Escape { text: text.into() })?;
    Ok(OsString::from_vec(bytes).into())
}

/// Decodes the `%XX` escapes of a URL into text; `None` if they are invalid.
fn unescape_text(text: &str) -> Option<String> {
    String::from_utf8(unescape_bytes(text)?).ok()
}

fn unescape_bytes(text: &str) -> Option<Vec<u8>> {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.bytes();
    while let Some(byte) = rest.next() {
        if byte != b'%' {
            bytes.push(byte);
            continue;
        }
        let mut digit = || rest.next().and_then(|digit| char::from(digit).to_digit(16));
        let (high, low) = (digit()?, digit()?);
        match u8::try_from(high << 4 | low) {
            Ok(byte @ 1..) => bytes.push(byte),
            _ => return None,
        }
    }
    Some(bytes)
}

#[cfg(test)]
mod tests;
