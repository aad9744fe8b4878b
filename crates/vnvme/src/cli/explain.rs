//! What is wrong with a command line, told so that it helps, where clap cannot know better.

use super::given::keys;
use crate::spec::{ControllerSpec, NamespaceSpec, NvmeTcpSpec, UblkSpec, VhostBlkSpec};
use clap::Error;
use clap::error::{ContextKind, ContextValue, ErrorKind};

/// The keys of tables that a command takes as words, `socket=/run/a.sock`.
fn keys_of(usage: &str) -> Vec<&'static str> {
    let is = |command| usage.contains(command);
    match () {
        () if is("vnvme add ") => [
            keys::<ControllerSpec>(),
            keys::<VhostBlkSpec>(),
            keys::<NvmeTcpSpec>(),
            keys::<UblkSpec>(),
        ]
        .concat(),
        () if is("vnvme attach ") => keys::<NamespaceSpec>(),
        () => Vec::new(),
    }
}

/// An option that is a key: clap's tip would have it be a volume.
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
        let tip = format!("what a configuration file says stands here as a word: {key}=VALUE");
        let tips = ContextValue::StyledStrs(vec![tip.into()]);
        error.remove(ContextKind::SuggestedArg);
        error.insert(ContextKind::Suggested, tips);
    }
    error
}
