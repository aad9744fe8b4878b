//! From what a user typed to a volume: a path, `file://PATH`, `mem://SIZE` or `null://SIZE`, with `?key=value&...`.

mod extras;
mod options;
mod quantity;

use crate::{
    Direct, FileOptions, FileVolume, MemVolume, NullOptions, NullVolume, Overlap, Volume,
    VolumeError,
};
pub use extras::Extras;
use options::Options;
pub use quantity::{parse_duration, parse_size};
use std::ffi::OsString;
use std::os::unix::ffi::OsStringExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

/// What the command line or configuration says about a volume, next to its URL.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct OpenOptions {
    /// Never write (a URL can only add this, not take it back).
    pub read_only: bool,
    /// Smallest block in bytes that requests will use, when the user has chosen one (`block-size=` overrides it).
    pub block_size: Option<u32>,
}

/// Why a URL gives no volume.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// Nothing was named.
    #[error("no volume is named; name a raw file, a block device, mem://SIZE or null://SIZE")]
    Nothing,
    /// The part before `://` is not known.
    #[error(
        "{scheme}:// is no kind of volume; known are a path, file://PATH, mem://SIZE and null://SIZE"
    )]
    Scheme {
        /// What was given.
        scheme: String,
    },
    /// A size could not be read.
    #[error("size \"{text}\" in {scheme}://{text}: {why}")]
    Size {
        /// The kind of volume.
        scheme: &'static str,
        /// What was given.
        text: String,
        /// What is wrong with it.
        why: &'static str,
    },
    /// A path with an incomplete `%` escape, or one that stands for a NUL byte.
    #[error(
        "path \"{text}\": a % in a file:// URL is followed by two hexadecimal digits, and never 00"
    )]
    Escape {
        /// What was given.
        text: String,
    },
    /// An option without `=`.
    #[error("option \"{text}\": options are written key=value, and separated by &")]
    NoValue {
        /// What was given.
        text: String,
    },
    /// An option that this kind of volume does not have.
    #[error("option \"{key}\" is unknown; {scheme} volumes have {known}")]
    UnknownOption {
        /// What was given.
        key: String,
        /// The kind of volume.
        scheme: &'static str,
        /// The options of this kind of volume.
        known: String,
    },
    /// An option given twice.
    #[error("option \"{key}\" is given twice")]
    Twice {
        /// What was given.
        key: String,
    },
    /// An option's value that could not be read.
    #[error("option {key}={value}: {why}")]
    Value {
        /// The option.
        key: String,
        /// What was given.
        value: String,
        /// What is wrong with it.
        why: &'static str,
    },
    /// A partition is chosen in two ways.
    #[error(
        "option \"{key}\": the partition is chosen already; give one of partition, partlabel and partuuid"
    )]
    TwoPartitions {
        /// The second one.
        key: String,
    },
    /// The partition that was named cannot be had.
    #[error("{name}: {source}")]
    Gpt {
        /// What was given.
        name: String,
        /// Why not.
        source: crate::gpt::GptError,
    },
    /// What was named is served already.
    #[error(transparent)]
    Overlap(#[from] Overlap),
    /// What was named could not be opened.
    #[error(transparent)]
    Volume(#[from] VolumeError),
}

const FILE: &[&str] = &["read-only", "direct", "lock", "block-size"];
const MEM: &[&str] = &["read-only"];
const NULL: &[&str] = &["read-only", "read-zeroes", "latency", "units", "name"];

/// Opens what `url` names.
///
/// | URL | volume | options |
/// |---|---|---|
/// | `PATH`, `file://PATH` | raw file or block device | `direct=auto\|on\|off`, `lock=on\|off`, `block-size=SIZE` |
/// | `mem://SIZE` | memory | |
/// | `null://SIZE` | nothing | `read-zeroes=on\|off`, `latency=DURATION`, `units=N` (at one time), `name=NAME` (a device of slices) |
///
/// All have `read-only=on|off` and the options of [`Extras::split`] (a part of the volume). A path is taken as it is when
/// a file of that very name exists, even with a `?` in it; in `file://` URLs bytes can be written as `%` and two
/// hexadecimal digits.
pub fn open_url(url: &str, open: OpenOptions) -> Result<Arc<dyn Volume>, OpenError> {
    let (whole, extras) = if scheme(url).0.is_empty() && Path::new(url).exists() {
        let path = PathBuf::from(url);
        (file(path, open, Options::none())?, Extras::default())
    } else {
        let (rest, extras) = Extras::split(url)?;
        (open_whole(&rest, open)?, extras)
    };
    let volume = extras.apply(whole.volume, url)?;
    // Locked only now that it is known which part is used; the others of this process, which have names, came first.
    if let (Some(file), Some(part)) = (whole.to_lock, volume.extent()) {
        file.lock(part.offset, part.len)?;
    }
    Ok(volume)
}

/// A volume, before the options that all volumes have.
struct Whole {
    volume: Arc<dyn Volume>,
    /// The file, if it is one, which is not locked yet.
    to_lock: Option<Arc<FileVolume>>,
}

impl Whole {
    fn new(volume: impl Volume + 'static) -> Self {
        Self {
            volume: Arc::new(volume),
            to_lock: None,
        }
    }
}

/// The scheme, empty for a path, and the rest.
fn scheme(url: &str) -> (&str, &str) {
    match url.split_once("://") {
        Some((scheme, rest)) if is_scheme(scheme) => (scheme, rest),
        _ => ("", url),
    }
}

fn open_whole(url: &str, open: OpenOptions) -> Result<Whole, OpenError> {
    let (scheme, rest) = scheme(url);
    let (name, query) = match rest.rsplit_once('?') {
        Some((name, query)) => (name, Some(query)),
        None => (rest, None),
    };
    match scheme {
        "" | "file" if name.is_empty() => Err(OpenError::Nothing),
        "" | "file" => {
            let path = match scheme {
                "" => PathBuf::from(name),
                _ => unescape(name)?,
            };
            let options = Options::parse("file", query, FILE)?;
            file(path, open, options)
        }
        "mem" => {
            let mut options = Options::parse("mem", query, MEM)?;
            let volume = MemVolume::new(size("mem", name)?)?;
            let volume = if options.read_only(open)? {
                volume.read_only()
            } else {
                volume
            };
            Ok(Whole::new(volume))
        }
        "null" => {
            let mut options = Options::parse("null", query, NULL)?;
            let volume = NullVolume::new(NullOptions {
                size: size("null", name)?,
                read_zeroes: options.switch("read-zeroes")?.unwrap_or(false),
                read_only: options.read_only(open)?,
                latency: options
                    .take("latency", parse_duration)?
                    .unwrap_or(Duration::ZERO),
                units: options.take("units", units)?.unwrap_or(0),
            })?;
            let name = options.take("name", |name| Ok(name.to_owned()))?;
            Ok(Whole::new(match name {
                Some(name) => volume.named(&name),
                None => volume,
            }))
        }
        scheme => Err(OpenError::Scheme {
            scheme: scheme.into(),
        }),
    }
}

fn units(text: &str) -> Result<usize, &'static str> {
    let number = text.parse().ok().filter(|n| (1..=4096).contains(n));
    number.ok_or("a number from 1 to 4096 is expected")
}

/// RFC 3986, 3.1. Anything else before `://` is part of a path.
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

fn file(path: PathBuf, open: OpenOptions, mut options: Options) -> Result<Whole, OpenError> {
    let direct = |text: &str| match text {
        "auto" => Ok(Direct::Auto),
        "on" => Ok(Direct::On),
        "off" => Ok(Direct::Off),
        _ => Err("it is auto, on or off"),
    };
    let block_size =
        |text: &str| u32::try_from(parse_size(text)?).map_err(|_| "the number is too large");
    let options = FileOptions {
        read_only: options.read_only(open)?,
        direct: options.take("direct", direct)?.unwrap_or_default(),
        lock: options.switch("lock")?.unwrap_or(true),
        block_size: options.take("block-size", block_size)?.or(open.block_size),
    };
    let file = Arc::new(FileVolume::open_unlocked(path, options)?);
    Ok(Whole {
        volume: file.clone(),
        to_lock: Some(file),
    })
}

/// Replaces `%XX` by the byte that it stands for.
fn unescape(text: &str) -> Result<PathBuf, OpenError> {
    let bytes = unescape_bytes(text).ok_or_else(|| OpenError::Escape { text: text.into() })?;
    Ok(OsString::from_vec(bytes).into())
}

/// The same in text.
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
