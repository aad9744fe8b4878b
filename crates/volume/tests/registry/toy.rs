//! A kind of volume that was added by the recipe of [`Registry`](volume::Registry): this module, and
//! one line where the registry is made.

use std::sync::Arc;
use volume::{
    NullOptions, NullVolume, OpenError, OpenOptions, READ_ONLY, Scheme, UrlOption, VolumeKind,
    VolumeUrl, Whole, parse_size,
};

const SCHEME: Scheme = Scheme {
    name: "zero",
    form: "SIZE",
    example: "zero://1G",
    help: "reads as zeroes",
    options: &[
        READ_ONLY,
        UrlOption::new("colour", "red|green", "the colour of the zeroes"),
        UrlOption::new("unused", "N", "an option that the kind forgets"),
    ],
};

pub fn kind() -> VolumeKind<String> {
    VolumeKind::new(SCHEME, open)
}

fn open(url: &mut VolumeUrl<'_>, open: OpenOptions) -> Result<Whole<String>, OpenError> {
    let colour = |text: &str| match text {
        "red" | "green" => Ok(text.to_owned()),
        _ => Err("it is red or green"),
    };
    let colour = url.options.take("colour", colour)?;
    let volume = NullVolume::new(NullOptions {
        size: parse_size(url.name).map_err(|why| OpenError::Other(why.into()))?,
        read_zeroes: true,
        read_only: url.options.read_only(open)?,
        ..NullOptions::default()
    })?;
    let volume = Arc::new(volume);
    Ok(match colour {
        Some(colour) => Whole::attached(volume, colour),
        None => Whole::new(volume),
    })
}
