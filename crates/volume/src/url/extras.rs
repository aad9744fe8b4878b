//! What every volume's URL can ask for, whatever kind of volume it is: a part of it.

use super::options::Options;
use super::{OpenError, parse_size};
use crate::gpt::{self, Which};
use crate::{SliceVolume, Volume, claim};
use std::sync::Arc;

/// The options that every volume has.
pub(super) const KEYS: &[&str] = &["offset", "length", "partition", "partlabel", "partuuid"];

/// What a URL asks for beyond the volume that it names: which part of it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Extras {
    partition: Option<Which>,
    offset: Option<u64>,
    length: Option<u64>,
}

impl Extras {
    /// Takes the options that every volume has out of a URL; returns it without them.
    ///
    /// | option | meaning |
    /// |---|---|
    /// | `partition=N` | the N-th partition of a GUID partition table |
    /// | `partlabel=NAME` | the partition of that label; `%26` stands for an `&` in it, and so on |
    /// | `partuuid=GUID` | the partition of that GUID |
    /// | `offset=SIZE` | from this byte on (of the partition, if one is chosen) |
    /// | `length=SIZE` | so many bytes |
    ///
    /// # Errors
    /// [`OpenError`]: an option cannot be read.
    pub fn split(url: &str) -> Result<(String, Self), OpenError> {
        let Some((name, query)) = url.rsplit_once('?') else {
            return Ok((url.into(), Self::default()));
        };
        let (rest, mut options) = Options::split(query, KEYS)?;
        let mut partition = None;
        let number = |text: &str| match text.parse() {
            Ok(0) | Err(_) => Err(
                "partitions have numbers from 1 on; others are chosen by partlabel= or partuuid=",
            ),
            Ok(number) => Ok(number),
        };
        let label = |text: &str| {
            super::unescape_text(text).ok_or("a % is followed by two hexadecimal digits")
        };
        let choices = [
            (
                "partition",
                options.take("partition", number)?.map(Which::Number),
            ),
            (
                "partlabel",
                options.take("partlabel", label)?.map(Which::Label),
            ),
            (
                "partuuid",
                options.take("partuuid", str::parse)?.map(Which::Guid),
            ),
        ];
        for (key, choice) in choices {
            if choice.is_some() && partition.is_some() {
                return Err(OpenError::TwoPartitions { key: key.into() });
            }
            partition = partition.or(choice);
        }
        let extras = Self {
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

    /// A part of the volume is asked for, not all of it.
    pub fn is_part(&self) -> bool {
        self.partition.is_some() || self.offset.is_some() || self.length.is_some()
    }

    /// Makes of the volume what the URL asked for, and enters it under the name (the whole URL) among those that this
    /// process serves.
    ///
    /// # Errors
    /// [`OpenError::Gpt`], [`OpenError::Volume`] (the part does not lie in the volume), [`OpenError::Overlap`].
    pub fn apply(&self, whole: Arc<dyn Volume>, name: &str) -> Result<Arc<dyn Volume>, OpenError> {
        let volume = self.cut(whole, name)?;
        claim(&volume, name)?;
        Ok(volume)
    }

    fn cut(&self, whole: Arc<dyn Volume>, name: &str) -> Result<Arc<dyn Volume>, OpenError> {
        let mut volume = whole;
        if let Some(which) = &self.partition {
            let found = gpt::find(&*volume, which).map_err(|source| OpenError::Gpt {
                name: name.into(),
                source,
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
