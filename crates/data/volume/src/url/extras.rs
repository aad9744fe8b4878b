//! URL options that every kind of volume accepts: a part of it, encryption, limits, a share of the
//! device.

use super::options::Options;
use super::{ESCAPE, OpenError, UrlOption, parse_count, parse_duration, parse_size};
use crate::gpt::{self, PartitionSelector};
use crate::{
    DEFAULT_WEIGHT, FairGroup, FairVolume, IoLimits, LimitVolume, SliceVolume, Volume, claim,
};
use std::path::PathBuf;
use std::sync::Arc;

/// Options of a URL that apply to every kind of volume: which part of it is used, its encryption,
/// its limits, and its share of the device.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Extras {
    partition: Option<PartitionSelector>,
    offset: Option<u64>,
    length: Option<u64>,
    encryption: Option<Encryption>,
    limits: Option<IoLimits>,
    share: Option<Share>,
}

/// Encryption that a URL requests: the volume, or its chosen part, is a LUKS container.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Encryption {
    /// Source of the key: a path, or `cred:NAME`. Never the key itself.
    pub key: String,
    /// File or block device with a detached header; `None`: the header is in the volume.
    pub header: Option<PathBuf>,
    /// Whether deallocation is passed to the encrypted storage.
    pub discard: bool,
}

/// Share of a device that a URL requests: the options for a [`FairVolume`](crate::FairVolume).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Share {
    weight: u32,
    depth: Option<usize>,
}

impl Extras {
    /// URL options that every kind of volume accepts.
    pub const OPTIONS: &'static [UrlOption] = &[
        UrlOption::new(
            "offset",
            "SIZE",
            "first byte of the slice, within the partition if one is chosen [default: 0]",
        ),
        UrlOption::new(
            "length",
            "SIZE",
            "length of the slice in bytes [default: up to the end]",
        ),
        UrlOption::new(
            "partition",
            "N",
            "number of a partition in the GUID partition table",
        ),
        UrlOption::new(
            "partlabel",
            "NAME",
            "label of a partition; percent-encode special characters, %26 for &",
        ),
        UrlOption::new("partuuid", "GUID", "GUID of a partition"),
        UrlOption::new(
            "luks",
            "KEYSOURCE",
            "decrypt a LUKS container with the key in a file, a named pipe, or the systemd \
             credential cred:NAME",
        ),
        UrlOption::new(
            "luks-header",
            "PATH",
            "file or block device with the detached LUKS header [default: in the volume]",
        ),
        UrlOption::new(
            "luks-discard",
            "on|off",
            "pass deallocation to the encrypted volume, which shows what is unused [default: off]",
        ),
        UrlOption::new(
            "iops",
            "N",
            "maximum requests per second; 0 for no limit for now (see vnvme limits)",
        ),
        UrlOption::new("read-iops", "N", "maximum reads per second"),
        UrlOption::new("write-iops", "N", "maximum writes per second"),
        UrlOption::new("bps", "SIZE", "maximum bytes per second"),
        UrlOption::new("read-bps", "SIZE", "maximum bytes read per second"),
        UrlOption::new("write-bps", "SIZE", "maximum bytes written per second"),
        UrlOption::new(
            "burst",
            "DURATION",
            "burst after a pause, as the time in which the limits allow as much [default: 50ms]",
        ),
        UrlOption::new(
            "weight",
            "N",
            "share of the device among its slices with a weight, 1 to 10000 [default: 100]",
        ),
        UrlOption::new(
            "share-depth",
            "N",
            "maximum outstanding requests of these slices in the device [default: 32]",
        ),
    ];

    /// Separates the options that every volume accepts ([`Extras::OPTIONS`]) from a URL. Returns
    /// the URL without them.
    ///
    /// # Errors
    /// [`OpenError`] when the value of an option is invalid.
    pub fn split(url: &str) -> Result<(String, Self), OpenError> {
        let Some((name, query)) = url.rsplit_once('?') else {
            return Ok((url.into(), Self::default()));
        };
        let (rest, mut options) = Options::split(query, Self::OPTIONS)?;
        let mut partition = None;
        let number = |text: &str| match text.parse() {
            Ok(0) | Err(_) => {
                Err("a partition number is expected, from 1; or choose by partlabel= or partuuid=")
            }
            Ok(number) => Ok(number),
        };
        let label = |text: &str| {
            super::unescape_text(text).ok_or("a % is followed by two hexadecimal digits")
        };
        let choices = [
            (
                "partition",
                options
                    .take("partition", number)?
                    .map(PartitionSelector::Number),
            ),
            (
                "partlabel",
                options
                    .take("partlabel", label)?
                    .map(PartitionSelector::Label),
            ),
            (
                "partuuid",
                options
                    .take("partuuid", str::parse)?
                    .map(PartitionSelector::Guid),
            ),
        ];
        for (key, choice) in choices {
            if choice.is_some() && partition.is_some() {
                return Err(OpenError::TwoPartitions { key: key.into() });
            }
            partition = partition.or(choice);
        }
        let extras = Self {
            encryption: encryption(&mut options)?,
            limits: limits(&mut options)?,
            share: share(&mut options)?,
            partition,
            offset: options.take("offset", parse_size)?,
            length: options.take("length", parse_size)?,
        };
        let url = if rest.is_empty() {
            name.into()
        } else {
            format!("{name}?{rest}")
        };
        Ok((url, extras))
    }

    /// Returns whether the URL selects a part of the volume (a partition or a range).
    pub fn is_part(&self) -> bool {
        self.partition.is_some() || self.offset.is_some() || self.length.is_some()
    }

    /// Returns the encryption that the URL requests.
    pub fn encryption(&self) -> Option<&Encryption> {
        self.encryption.as_ref()
    }

    /// Returns whether the URL sets limits or a share of the device, so that requests are counted.
    pub fn is_limited(&self) -> bool {
        self.limits.is_some() || self.share.is_some()
    }

    /// Returns the limits that the URL sets.
    pub fn limits(&self) -> Option<IoLimits> {
        self.limits
    }

    /// Returns the volume's weight among the slices of its device, if the URL gives it one.
    pub fn weight(&self) -> Option<u32> {
        self.share.map(|share| share.weight)
    }

    /// Applies the URL's options to the volume, and registers it under the name (the whole URL)
    /// among the volumes that this process serves. `decrypt` opens an encrypted volume.
    ///
    /// # Errors
    /// [`OpenError::Gpt`] when the partition cannot be found, [`OpenError::Volume`] when the part
    /// does not lie in the volume, [`OpenError::Overlap`] when another export serves the same
    /// bytes; errors of `decrypt`.
    pub fn apply(
        &self,
        whole: Arc<dyn Volume>,
        name: &str,
        decrypt: impl FnOnce(Arc<dyn Volume>, &Encryption) -> Result<Arc<dyn Volume>, OpenError>,
    ) -> Result<Arc<dyn Volume>, OpenError> {
        let mut volume = self.cut(whole, name)?;
        if let Some(encryption) = &self.encryption {
            volume = decrypt(volume, encryption)?;
        }
        let volume = self.limit(volume)?;
        claim(&volume, name)?;
        Ok(volume)
    }

    fn limit(&self, volume: Arc<dyn Volume>) -> Result<Arc<dyn Volume>, OpenError> {
        let mut volume = volume;
        let extent = volume.extent();
        if let Some(Share { weight, depth }) = self.share {
            let Some(extent) = extent else {
                return Err(OpenError::Value {
                    key: "weight".into(),
                    value: weight.to_string(),
                    why: "no other disk can have a share of this volume: it is opened only once, or without lock=",
                });
            };
            let group = FairGroup::of(&extent.root, depth);
            volume = Arc::new(FairVolume::new(volume, group, weight));
        } else if let Some(extent) = extent {
            volume = Arc::new(FairVolume::dormant(volume, extent.root));
        }
        Ok(Arc::new(match self.limits {
            Some(limits) => LimitVolume::new(volume, limits),
            None => LimitVolume::dormant(volume),
        }))
    }

    fn cut(&self, whole: Arc<dyn Volume>, name: &str) -> Result<Arc<dyn Volume>, OpenError> {
        let mut volume = whole;
        if let Some(which) = &self.partition {
            let found = gpt::find(&*volume, which).map_err(|error| OpenError::Gpt {
                name: name.into(),
                error,
            })?;
            volume = Arc::new(SliceVolume::new(volume, found.offset, Some(found.len))?);
        }
        if self.offset.is_some() || self.length.is_some() {
            let offset = self.offset.unwrap_or(0);
            volume = Arc::new(SliceVolume::new(volume, offset, self.length)?);
        }
        Ok(volume)
    }
}

fn encryption(options: &mut Options) -> Result<Option<Encryption>, OpenError> {
    let source = |text: &str| match super::unescape_text(text) {
        None => Err(ESCAPE),
        Some(text) if text.is_empty() => Err("a path or cred:NAME is expected, never the key"),
        Some(text) => Ok(text),
    };
    let path = |text: &str| super::unescape(text).map_err(|_| ESCAPE);
    let key = options.take("luks", source)?;
    let header = options.take("luks-header", path)?;
    let discard = options.switch("luks-discard")?;
    let stray = match (&header, discard) {
        (Some(path), _) => Some(("luks-header", path.display().to_string())),
        (None, Some(discard)) => Some(("luks-discard", discard.to_string())),
        (None, None) => None,
    };
    match (key, stray) {
        (Some(key), _) => Ok(Some(Encryption {
            key,
            header,
            discard: discard.unwrap_or(false),
        })),
        (None, None) => Ok(None),
        (None, Some((key, value))) => Err(OpenError::Value {
            key: key.into(),
            value,
            why: "it has an effect only together with luks=KEYSOURCE",
        }),
    }
}

fn limits(options: &mut Options) -> Result<Option<IoLimits>, OpenError> {
    let mut limits = IoLimits::default();
    let iops = &mut limits.iops;
    let bps = &mut limits.bps;
    let rates = [
        ("iops", &mut iops.total),
        ("read-iops", &mut iops.read),
        ("write-iops", &mut iops.write),
        ("bps", &mut bps.total),
        ("read-bps", &mut bps.read),
        ("write-bps", &mut bps.write),
    ];
    let mut limited = false;
    for (key, rate) in rates {
        let read = if key.ends_with("iops") {
            parse_count
        } else {
            parse_size
        };
        if let Some(limit) = options.take(key, read)? {
            (*rate, limited) = (limit, true);
        }
    }
    if let Some(burst) = options.take("burst", parse_duration)? {
        (limits.burst, limited) = (burst, true);
    }
    Ok(limited.then_some(limits))
}

fn share(options: &mut Options) -> Result<Option<Share>, OpenError> {
    let within = |most: u32| {
        move |text: &str| {
            let number = text.parse().ok().filter(|n| (1..=most).contains(n));
            number.ok_or("a number from 1 on is expected (weights go up to 10000, depths to 4096)")
        }
    };
    let weight = options.take("weight", within(10_000))?;
    let depth = options.take("share-depth", within(4096))?;
    Ok((weight.is_some() || depth.is_some()).then(|| Share {
        weight: weight.unwrap_or(DEFAULT_WEIGHT),
        depth: depth.map(|depth| depth as usize),
    }))
}
