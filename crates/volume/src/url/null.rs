//! URLs of null volumes, `null://SIZE`.

use super::{OpenError, OpenOptions, READ_ONLY, Scheme, UrlOption, VolumeKind, VolumeUrl, Whole};
use super::{parse_duration, size};
use crate::{NullOptions, NullVolume};
use std::sync::Arc;
use std::time::Duration;

const SCHEME: Scheme = Scheme {
    name: "null",
    form: "SIZE",
    example: "null://1T",
    help: "completes at once and stores nothing, for measurements",
    options: &[
        READ_ONLY,
        UrlOption::new(
            "read-zeroes",
            "on|off",
            "reads give zeroes [default: off, memory stays as it is]",
        ),
        UrlOption::new("latency", "DURATION", "complete after this time instead"),
        UrlOption::new(
            "units",
            "N",
            "requests that take their latency at one time; others wait [default: all]",
        ),
        UrlOption::new(
            "name",
            "NAME",
            "slices of one name share one device's units",
        ),
    ],
};

pub(super) fn kind<X: 'static>() -> VolumeKind<X> {
    VolumeKind::new(SCHEME, open)
}

fn open<X>(url: &mut VolumeUrl<'_>, open: OpenOptions) -> Result<Whole<X>, OpenError> {
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
    Ok(Whole::new(Arc::new(match name {
        Some(name) => volume.named(&name),
        None => volume,
    })))
}

fn units(text: &str) -> Result<usize, &'static str> {
    let number = text.parse().ok().filter(|n| (1..=4096).contains(n));
    number.ok_or("a number from 1 to 4096 is expected")
}
