//! Tips for command-line errors that clap cannot give.

use clap::Error;
use clap::error::{ContextKind, ContextValue, ErrorKind};
use config::disk_kinds;
use config::options::Spec;
use config::spec::NamespaceSpec;

/// Returns the keys of a configuration table.
fn keys<S: Spec>() -> Vec<&'static str> {
    let nested = S::NESTED.iter().map(|(key, _)| *key);
    S::ROWS.iter().map(|row| row.key).chain(nested).collect()
}

macro_rules! keys_of_kinds {
    ({} $($(#[$doc:meta])* $kind:ident($spec:ident), $list:ident;)*) => {
        [$(keys::<config::disk::$spec>()),*].concat()
    };
}

/// Keys of the configuration tables that a command accepts as words, `socket=/run/a.sock`.
fn keys_of(usage: &str) -> Vec<&'static str> {
    let is = |command| usage.contains(command);
    match () {
        () if is("vnvme add ") => disk_kinds!(keys_of_kinds),
        () if is("vnvme attach ") => keys::<NamespaceSpec>(),
        () => Vec::new(),
    }
}

/// Replaces clap's tip for an option that is a configuration key, since clap would suggest a
/// volume.
pub fn explain(mut error: Error) -> Error {
    if error.kind() != ErrorKind::UnknownArgument {
        return error;
    }
    let text = |kind| error.get(kind).map(ToString::to_string);
    let (Some(given), Some(usage)) = (text(ContextKind::InvalidArg), text(ContextKind::Usage))
    else {
        return error;
    };
    let Some(name) = given.strip_prefix("--") else {
        return error;
    };
    let name = name.split_once('=').map_or(name, |(name, _)| name);
    if let Some(key) = volume::similar(name, keys_of(&usage)) {
        let tip = format!("keys of the configuration file are words here: {key}=VALUE");
        let tips = ContextValue::StyledStrs(vec![tip.into()]);
        error.remove(ContextKind::SuggestedArg);
        error.insert(ContextKind::Suggested, tips);
    }
    error
}
