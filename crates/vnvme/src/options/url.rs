//! What a volume's URL may say of that which shows the volume: `disk.raw?serial=ROOT`.

use super::{Spec, Url};
use crate::devices::DeviceRegistry;
use anyhow::{Context, Result, anyhow, bail, ensure};
use std::ffi::OsStr;
use std::path::Path;
use volume::Extras;

/// What shows the volume of this path or URL.
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

/// Takes the options out of the volume's URL that are rows of the table; the others are the
/// volume's.
///
/// # Errors
/// One cannot be read, or was given already.
pub fn take<S: Spec>(spec: &mut S) -> Result<()> {
    let Some(Url(text)) = spec.volume().map(|url| url.clone()) else {
        return Ok(());
    };
    // A path is taken as it is when a file of that very name exists.
    if Path::new(&text).exists() {
        return Ok(());
    }
    let Some((name, query)) = text.split_once('?') else {
        return Ok(());
    };
    let mut rest = Vec::new();
    for pair in query.split('&') {
        let Some((key, value)) = pair.split_once('=') else {
            bail!("{text}: \"{pair}\" is no option: key=value");
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

/// The option of the table that was meant by a key that no volume has.
fn meant<S: Spec>(key: &str) -> Option<&'static str> {
    let kinds = crate::open::kinds(DeviceRegistry::default());
    let of_kinds = kinds.schemes().flat_map(|scheme| scheme.options);
    let mut of_volumes = of_kinds.chain(Extras::OPTIONS).map(|option| option.name);
    if of_volumes.any(|name| name == key) {
        return None;
    }
    let rows = S::ROWS.iter().filter(|row| row.url);
    volume::similar(key, rows.map(|row| row.key))
}

/// The options that a URL may say: each as it is written, and its help.
pub fn options<S: Spec>() -> impl Iterator<Item = (String, String)> {
    let rows = S::ROWS.iter().filter(|row| row.url);
    rows.map(|row| (format!("{}={}", row.key, row.form), row.help_with_default()))
}
