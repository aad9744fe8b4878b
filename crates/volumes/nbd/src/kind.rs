//! URL schemes `nbd` and `nbd+unix`, and the volume kinds that open such URLs.

use crate::connect::{ConnectionKeeper, NbdServer};
use crate::export::{NbdOptions, NbdVolume};
use remote::{Address, ReachWatch};
use std::sync::Arc;
use volume::{
    BareVolume, OpenError, OpenOptions, READ_ONLY, Scheme, UrlOption, VolumeKind, VolumeUrl,
    parse_count, parse_duration,
};

/// URL scheme `nbd` of NBD servers that are reached by TCP.
pub const NBD: Scheme = Scheme {
    name: "nbd",
    form: "HOST:PORT/EXPORT",
    example: "nbd://10.0.0.2:10809/vm0",
    help: "export of an NBD server over TCP, without TLS",
    options: &[READ_ONLY, CONNECTIONS, TIMEOUT, RECONNECT_DELAY],
};

/// URL scheme of NBD servers that are reached by a Unix socket.
pub const NBD_UNIX: Scheme = Scheme {
    name: "nbd+unix",
    form: "/EXPORT?socket=PATH",
    example: "nbd+unix:///vm0?socket=/run/nbd.sock",
    help: "export of an NBD server over a Unix socket",
    options: &[READ_ONLY, SOCKET, CONNECTIONS, TIMEOUT, RECONNECT_DELAY],
};

const SOCKET: UrlOption = UrlOption::new("socket", "PATH", "path of the server's socket");

const CONNECTIONS: UrlOption = UrlOption::new(
    "connections",
    "N",
    "connections of each worker, if the server allows several [default: 1]",
);

const TIMEOUT: UrlOption = UrlOption::new(
    "timeout",
    "DURATION",
    "time limit of a request, after which to reconnect [default: 30s]",
);

const RECONNECT_DELAY: UrlOption = UrlOption::new(
    "reconnect-delay",
    "DURATION",
    "time that requests wait for an unreachable server; after it, they fail until the server is \
     back [default: 300s]",
);

/// Returns the volume kinds of both schemes; each opened volume passes its watch to `opened`.
pub fn kinds<X: 'static>(
    opened: impl Fn(ReachWatch) + Clone + Send + Sync + 'static,
) -> [VolumeKind<X>; 2] {
    kinds_kept(opened, None)
}

/// Returns the volume kinds of both schemes, with a keeper of connections for the next process.
pub fn kinds_kept<X: 'static>(
    opened: impl Fn(ReachWatch) + Clone + Send + Sync + 'static,
    keeper: Option<Arc<dyn ConnectionKeeper>>,
) -> [VolumeKind<X>; 2] {
    [NBD, NBD_UNIX].map(|scheme| {
        let (opened, keeper) = (opened.clone(), keeper.clone());
        VolumeKind::new(scheme, move |url: &mut VolumeUrl<'_>, options| {
            let volume = open(url, options, keeper.clone())?;
            opened(volume.watch());
            Ok(BareVolume::new(Arc::new(volume)))
        })
    })
}

/// Parses the server in a URL.
///
/// # Errors
/// [`OpenError`] when an option or the name of the export is invalid.
fn server(url: &mut VolumeUrl<'_>) -> Result<NbdServer, OpenError> {
    let socket = url.options.take("socket", |text| Ok(text.to_owned()))?;
    let server = match (url.scheme() == NBD_UNIX.name, socket) {
        (true, Some(socket)) => NbdServer::unix(url.name, &socket),
        (true, None) => Err("nbd+unix:// names the server's socket: \
                             nbd+unix:///EXPORT?socket=PATH"
            .into()),
        (false, _) => NbdServer::tcp(url.name),
    };
    server.map_err(|why| OpenError::Other(why.into()))
}

/// Returns the address of the server in a URL of these schemes; `None` for other URLs. For a
/// process that must know its peers before it enters a sandbox.
pub fn address(url: &str) -> Option<Address> {
    let (scheme, rest) = url.split_once("://")?;
    let (name, query) = rest.rsplit_once('?').unwrap_or((rest, ""));
    let server = match scheme {
        "nbd" => NbdServer::tcp(name),
        "nbd+unix" => {
            let mut options = query.split('&');
            NbdServer::unix(
                name,
                options.find_map(|option| option.strip_prefix("socket="))?,
            )
        }
        _ => return None,
    };
    server.ok().map(|server| server.address)
}

fn open(
    url: &mut VolumeUrl<'_>,
    open: OpenOptions,
    keeper: Option<Arc<dyn ConnectionKeeper>>,
) -> Result<NbdVolume, OpenError> {
    let server = server(url)?;
    let default = NbdOptions::default();
    let connections = |text: &str| match parse_count(text)?.try_into() {
        Ok(count @ 1..=NbdOptions::MAX_CONNECTIONS) => Ok(count),
        _ => Err("it is a number from 1 to 16"),
    };
    let timeout = |text: &str| match parse_duration(text)? {
        time if time.as_millis() < 100 => Err("it is at least 100ms"),
        time => Ok(time),
    };
    let delay = |text: &str| match parse_duration(text)? {
        time if time.as_secs() < 1 => Err("it is at least 1s"),
        time => Ok(time),
    };
    let options = NbdOptions {
        connections: url
            .options
            .take("connections", connections)?
            .unwrap_or(default.connections),
        timeout: url
            .options
            .take("timeout", timeout)?
            .unwrap_or(default.timeout),
        reconnect_delay: url
            .options
            .take("reconnect-delay", delay)?
            .unwrap_or(default.reconnect_delay),
        read_only: url.options.read_only(&open)?,
        block_size: open.block_size,
    };
    NbdVolume::open_kept(server, options, keeper).map_err(OpenError::Other)
}
