//! Options in a volume's URL that configure its namespace or export: `disk.raw?serial=ROOT`.

use super::{Spec, Url};
use crate::volumes;
use anyhow::{Context, Result, anyhow, bail, ensure};
use std::ffi::OsStr;
use std::path::Path;

/// Parses a path or URL into the namespace, export or block device of the volume.
///
/// # Errors
/// See [`take`].
pub fn parse<S: Spec>(text: &str) -> Result<S> {
    let mut spec = S::default();
    if let Some(volume) = spec.volume() {
        *volume = Url(text.to_owned());
    }
    take(&mut spec)?;
    Ok(spec)
}

/// Removes the options of the table from the volume's URL, and sets them. The remaining options
/// belong to the volume.
///
/// # Errors
/// An option has an invalid value, or is already set.
pub fn take<S: Spec>(spec: &mut S) -> Result<()> {
    let Some(Url(text)) = spec.volume().map(|url| url.clone()) else {
        return Ok(());
    };
    let Some((name, query)) = text.split_once('?') else {
        return Ok(());
    };
    // A path is unchanged when a file of that very name exists.
    if Path::new(&text).exists() {
        return Ok(());
    }
    let mut rest = Vec::new();
    for pair in query.split('&') {
        let Some((key, value)) = pair.split_once('=') else {
            bail!("{text}: option \"{pair}\" is not of the form key=value");
        };
        let Some(row) = S::row(key).filter(|row| row.url) else {
            if let Some(meant) = meant::<S>(key) {
                bail!("{text}: option \"{key}\" is unknown, did you mean \"{meant}\"?");
            }
            rest.push(pair);
            continue;
        };
        let first = (row.setting)(spec).is_empty();
        ensure!(first, "{text}: option \"{key}\" is given twice");
        let set = row.set_text(spec, OsStr::new(value));
        set.map_err(|why| anyhow!(why))
            .with_context(|| format!("{text}: {key}={value}"))?;
    }
    let own = match rest.as_slice() {
        [] => name.to_owned(),
        rest => format!("{name}?{}", rest.join("&")),
    };
    if let Some(volume) = spec.volume() {
        *volume = Url(own);
    }
    Ok(())
}

/// Returns the option of the table that was probably meant by a key that no volume has.
fn meant<S: Spec>(key: &str) -> Option<&'static str> {
    if volumes::option_names().any(|name| name == key) {
        return None;
    }
    let rows = S::ROWS.iter().filter(|row| row.url);
    volume::similar(key, rows.map(|row| row.key))
}

/// Returns the options that a URL accepts: each as it is written, with its help.
pub fn options<S: Spec>() -> impl Iterator<Item = (String, String)> {
    let rows = S::ROWS.iter().filter(|row| row.url);
    rows.map(|row| (format!("{}={}", row.key, row.form), row.help_with_default()))
}
