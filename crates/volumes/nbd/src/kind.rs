//! URL schemes `nbd` and `nbd+unix`, and the kind of volumes that they name.

use crate::connect::NbdServer;
use crate::export::{NbdOptions, NbdVolume};
use remote::{Address, ConnectionKeeper, ReachWatch, RemoteKind};
use std::sync::Arc;
use volume::{
    OpenError, OpenOptions, READ_ONLY, Scheme, UrlOption, Volume, VolumeUrl, parse_count,
    parse_duration,
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

/// NBD, over TCP and Unix sockets.
#[derive(Debug)]
pub struct Nbd;

impl RemoteKind for Nbd {
    fn schemes(&self) -> &'static [Scheme] {
        &[NBD, NBD_UNIX]
    }

    fn open(
        &self,
        url: &mut VolumeUrl<'_>,
        options: OpenOptions,
        keeper: Option<Arc<dyn ConnectionKeeper>>,
    ) -> Result<(Arc<dyn Volume>, ReachWatch), OpenError> {
        let volume = open(url, options, keeper)?;
        let watch = volume.watch();
        Ok((Arc::new(volume), watch))
    }

    fn servers(&self, url: &str) -> Option<Vec<Address>> {
        address(url).map(|address| vec![address])
    }

    /// The connections of the previous process have ended ([`remote::end_previous`]).
    fn is_fenced(&self) -> bool {
        true
    }

    fn foreign_url(&self, url: &str) -> Option<&'static str> {
        const NO_TLS: &str = "NBD with TLS is not supported; connect by nbd:// or nbd+unix://, \
                              through a TLS tunnel on this host where the network is not trusted";
        const FORM: &str = "an NBD server's export is named nbd://HOST:PORT/EXPORT or \
                            nbd+unix:///EXPORT?socket=PATH";
        let (scheme, rest) = url.split_once(':')?;
        match (scheme, rest.starts_with("//")) {
            ("nbds" | "nbds+unix", true) => Some(NO_TLS),
            ("nbd", false) => Some(FORM),
            _ => None,
        }
    }
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

/// Returns the address of the server in a URL; `None` for URLs of other schemes.
fn address(url: &str) -> Option<Address> {
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
