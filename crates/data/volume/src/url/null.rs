//! URLs of null volumes, `null://SIZE`.

use super::{
    BareVolume, OpenError, OpenOptions, READ_ONLY, Scheme, UrlOption, VolumeKind, VolumeUrl,
};
use super::{parse_duration, size};
use crate::{NullOptions, NullVolume};
use std::sync::Arc;
use std::time::Duration;

const SCHEME: Scheme = Scheme {
    name: "null",
    form: "SIZE",
    example: "null://1T",
    help: "null device for measurements: completes requests at once and stores nothing",
    options: &[
        READ_ONLY,
        UrlOption::new(
            "read-zeroes",
            "on|off",
            "return zeroes from reads [default: off, which leaves memory unchanged]",
        ),
        UrlOption::new("latency", "DURATION", "complete requests after this time"),
        UrlOption::new(
            "units",
            "N",
            "requests executed at a time, each for its latency; further requests wait [default: \
             all]",
        ),
        UrlOption::new(
            "name",
            "NAME",
            "name of the device; slices with the same name share its units",
        ),
    ],
};

pub(super) fn kind<X: 'static>() -> VolumeKind<X> {
    VolumeKind::new(SCHEME, open)
}

fn open<X>(url: &mut VolumeUrl<'_>, open: OpenOptions) -> Result<BareVolume<X>, OpenError> {
    let options = &mut url.options;
    let volume = NullVolume::new(NullOptions {
        size: size(SCHEME.name, url.name)?,
        read_zeroes: options.switch("read-zeroes")?.unwrap_or(false),
        read_only: options.read_only(&open)?,
        latency: options
            .take("latency", parse_duration)?
            .unwrap_or(Duration::ZERO),
        units: options.take("units", units)?.unwrap_or(0),
    })?;
    let name = options.take("name", |name| Ok(name.to_owned()))?;
    Ok(BareVolume::new(Arc::new(match name {
        Some(name) => volume.named(&name),
        None => volume,
    })))
}

fn units(text: &str) -> Result<usize, &'static str> {
    let number = text.parse().ok().filter(|n| (1..=4096).contains(n));
    number.ok_or("a number from 1 to 4096 is expected")
}
