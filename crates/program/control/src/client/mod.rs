//! A blocking client, for the command line and for tests.

mod error;
mod events;
mod io;

pub use error::ClientError;

use crate::api::{
    AnaChange, AnaStatus, DeviceStatus, Disk, DiskKind, ErrorBody, ErrorChange, Export,
    LimitChange, Namespace, NewDisk, NewExport, PathChange, PathState, Plan, Resize, Stats,
    VolumeErrors, VolumeLimits,
};
use crate::events::Received;
use bytes::Bytes;
use events::Lines;
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use hyper::client::conn::http1;
use hyper::{Method, Request, Response, StatusCode, header};
use io::Io;
use percent_encoding::{NON_ALPHANUMERIC, utf8_percent_encode};
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::{Map, Value};
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::time::Duration;
use tokio::net::UnixStream;
use tokio::runtime::Runtime;

/// Time limit of a request that changes nothing.
const QUESTION_TIME: Duration = Duration::from_secs(10);
/// Time limit of a change: a device that comes up, a disk that is drained.
const CHANGE_TIME: Duration = Duration::from_secs(150);

/// Blocking client of the management API. Each request has a connection of its own.
#[derive(Debug)]
pub struct Client {
    runtime: Runtime,
    paths: Vec<PathBuf>,
}

/// Successful answer of the management API.
struct Answer {
    path: PathBuf,
    body: Bytes,
}

impl Answer {
    fn json<T: DeserializeOwned>(&self) -> Result<T, ClientError> {
        serde_json::from_slice(&self.body).map_err(|error| ClientError::broken(&self.path, &error))
    }
}

/// Returns a name with the characters escaped that a URL cannot contain.
fn encoded(name: &str) -> impl std::fmt::Display {
    utf8_percent_encode(name, NON_ALPHANUMERIC)
}

impl Client {
    /// Makes a client of the process behind the first of these sockets that accepts a connection.
    ///
    /// # Errors
    /// There is no epoll set or eventfd to be had.
    pub fn new(paths: Vec<PathBuf>) -> Result<Self, ClientError> {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_io()
            .enable_time()
            .build();
        Ok(Self {
            runtime: runtime.map_err(ClientError::System)?,
            paths,
        })
    }

    /// Returns all disks, sorted by name.
    ///
    /// # Errors
    /// [`ClientError`], here and below.
    pub fn disks(&self) -> Result<Vec<Disk>, ClientError> {
        self.get("/v1/disks")
    }

    /// Returns the disk with this name.
    ///
    /// # Errors
    /// As [`Client::disks`].
    pub fn disk(&self, name: &str) -> Result<Disk, ClientError> {
        self.get(&format!("/v1/disks/{}", encoded(name)))
    }

    /// Adds a disk; `table` has the keys of its table in a configuration file.
    ///
    /// # Errors
    /// As [`Client::disks`].
    pub fn add(&self, kind: DiskKind, table: Map<String, Value>) -> Result<Disk, ClientError> {
        let disk = NewDisk { kind, table };
        self.change(Method::POST, "/v1/disks", Some(&disk))?.json()
    }

    /// Removes a disk. With `force`, even while a client is attached.
    ///
    /// # Errors
    /// As [`Client::disks`].
    pub fn remove(&self, name: &str, force: bool) -> Result<(), ClientError> {
        let path = format!("/v1/disks/{}?force={force}", encoded(name));
        self.change(Method::DELETE, &path, None::<&()>).map(drop)
    }

    /// Confirms the volumes that an unavailable disk has been found to have.
    ///
    /// # Errors
    /// As [`Client::disks`].
    pub fn accept(&self, name: &str) -> Result<(), ClientError> {
        let path = format!("/v1/disks/{}/accept", encoded(name));
        self.change(Method::POST, &path, None::<&()>).map(drop)
    }

    /// Changes the disks to those of a configuration; with `dry_run`, only plans the changes.
    ///
    /// # Errors
    /// As [`Client::disks`].
    pub fn apply(&self, config: &Map<String, Value>, dry_run: bool) -> Result<Plan, ClientError> {
        let path = format!("/v1/apply?dry-run={dry_run}");
        self.change(Method::POST, &path, Some(config))?.json()
    }

    /// Rereads the configuration, and applies it.
    ///
    /// # Errors
    /// As [`Client::disks`].
    pub fn reload(&self) -> Result<Plan, ClientError> {
        self.change(Method::POST, "/v1/reload", None::<&()>)?.json()
    }

    /// Attaches a namespace to a controller.
    ///
    /// # Errors
    /// As [`Client::disks`].
    pub fn attach(&self, name: &str, table: &Map<String, Value>) -> Result<Namespace, ClientError> {
        let path = format!("/v1/disks/{}/namespaces", encoded(name));
        self.change(Method::POST, &path, Some(table))?.json()
    }

    /// Detaches a namespace from a controller.
    ///
    /// # Errors
    /// As [`Client::disks`].
    pub fn detach(&self, name: &str, nsid: u32) -> Result<(), ClientError> {
        let path = format!("/v1/disks/{}/namespaces/{nsid}", encoded(name));
        self.change(Method::DELETE, &path, None::<&()>).map(drop)
    }

    /// Changes the size of a namespace, in bytes.
    ///
    /// # Errors
    /// As [`Client::disks`].
    pub fn resize(&self, name: &str, nsid: u32, bytes: u64) -> Result<Namespace, ClientError> {
        let path = format!("/v1/disks/{}/namespaces/{nsid}", encoded(name));
        self.change(Method::PATCH, &path, Some(&Resize { bytes }))?
            .json()
    }

    /// Returns all exports of disks over NBD.
    ///
    /// # Errors
    /// As [`Client::disks`].
    pub fn exports(&self) -> Result<Vec<Export>, ClientError> {
        self.get("/v1/exports")
    }

    /// Exports a disk over NBD.
    ///
    /// # Errors
    /// As [`Client::disks`].
    pub fn export(&self, export: &NewExport) -> Result<Export, ClientError> {
        self.change(Method::POST, "/v1/exports", Some(export))?
            .json()
    }

    /// Ends all exports of a disk.
    ///
    /// # Errors
    /// As [`Client::disks`].
    pub fn unexport(&self, disk: &str) -> Result<(), ClientError> {
        let path = format!("/v1/exports/{}", encoded(disk));
        self.change(Method::DELETE, &path, None::<&()>).map(drop)
    }

    /// Changes limits, or asks for them; answers those of the volumes that were meant.
    ///
    /// # Errors
    /// As [`Client::disks`].
    pub fn limits(&self, change: &LimitChange) -> Result<Vec<VolumeLimits>, ClientError> {
        if *change == LimitChange::default() {
            return self.get("/v1/limits");
        }
        self.change(Method::PATCH, "/v1/limits", Some(change))?
            .json()
    }

    /// Changes error policies, repeats requests that wait, or only queries; returns the policies of
    /// the selected volumes.
    ///
    /// # Errors
    /// As [`Client::disks`].
    pub fn on_error(&self, change: &ErrorChange) -> Result<Vec<VolumeErrors>, ClientError> {
        if *change == ErrorChange::default() {
            return self.get("/v1/on-error");
        }
        self.change(Method::PATCH, "/v1/on-error", Some(change))?
            .json()
    }

    /// Changes paths to devices, or asks for them; answers those of the namespaces that were meant.
    ///
    /// # Errors
    /// As [`Client::disks`].
    pub fn paths(&self, change: &PathChange) -> Result<Vec<PathState>, ClientError> {
        if *change == PathChange::default() {
            return self.get("/v1/paths");
        }
        self.change(Method::PATCH, "/v1/paths", Some(change))?
            .json()
    }

    /// Changes how a disk's host reaches shared namespaces, or asks; answers the states of the
    /// groups that were meant.
    ///
    /// # Errors
    /// As [`Client::disks`].
    pub fn ana(&self, change: &AnaChange) -> Result<Vec<AnaStatus>, ClientError> {
        if *change == AnaChange::default() {
            return self.get("/v1/ana");
        }
        self.change(Method::PATCH, "/v1/ana", Some(change))?.json()
    }

    /// Shuts a device down.
    ///
    /// # Errors
    /// As [`Client::disks`].
    pub fn suspend(&self, device: &str) -> Result<DeviceStatus, ClientError> {
        let path = format!("/v1/devices/{}/suspend", encoded(device));
        self.change(Method::POST, &path, None::<&()>)?.json()
    }

    /// Brings a suspended device up again.
    ///
    /// # Errors
    /// As [`Client::disks`].
    pub fn resume(&self, device: &str) -> Result<DeviceStatus, ClientError> {
        let path = format!("/v1/devices/{}/resume", encoded(device));
        self.change(Method::POST, &path, None::<&()>)?.json()
    }

    /// Has another version take the process's place: from now on it may be the one that answers.
    ///
    /// # Errors
    /// As [`Client::disks`]; so if it is refused.
    pub fn upgrade(&self) -> Result<(), ClientError> {
        match self.change(Method::POST, "/v1/upgrade", None::<&()>) {
            // The process that was asked has ended.
            Ok(_) | Err(ClientError::NotControl(_)) => Ok(()),
            Err(error) => Err(error),
        }
    }

    /// Returns the running configuration as a configuration file.
    ///
    /// # Errors
    /// As [`Client::disks`].
    pub fn save(&self) -> Result<String, ClientError> {
        self.text("/v1/config")
    }

    /// Returns all counters of the process.
    ///
    /// # Errors
    /// As [`Client::disks`].
    pub fn stats(&self) -> Result<Stats, ClientError> {
        self.get("/v1/stats")
    }

    /// Returns the metrics in the text format of Prometheus (`/metrics`).
    ///
    /// # Errors
    /// As [`Client::disks`].
    pub fn metrics(&self) -> Result<String, ClientError> {
        self.text("/metrics")
    }

    /// Gives each event to a function as it happens, until the function or the server ends it.
    /// `ready` is called when no further event can be missed.
    ///
    /// # Errors
    /// As [`Client::disks`].
    pub fn events(
        &self,
        ready: impl FnOnce(),
        mut each: impl FnMut(Received) -> ControlFlow<()>,
    ) -> Result<(), ClientError> {
        let request = self.request(&Method::GET, "/v1/events", None);
        self.runtime.block_on(async {
            let request = tokio::time::timeout(QUESTION_TIME, request).await;
            let (path, response) = request.map_err(|_| self.timed_out())??;
            let mut body = good(&path, response).await?;
            ready();
            let mut lines = Lines::default();
            while let Some(frame) = body.frame().await {
                let frame = frame.map_err(|error| ClientError::broken(&path, &error))?;
                let data = frame.data_ref().map(|data| &data[..]).unwrap_or_default();
                for received in lines.push(data) {
                    let received = received.map_err(|error| ClientError::broken(&path, &error))?;
                    if each(received).is_break() {
                        return Ok(());
                    }
                }
            }
            Ok(())
        })
    }

    fn get<T: DeserializeOwned>(&self, path: &str) -> Result<T, ClientError> {
        self.ask(&Method::GET, path, None, QUESTION_TIME)?.json()
    }

    fn text(&self, path: &str) -> Result<String, ClientError> {
        let answer = self.ask(&Method::GET, path, None, QUESTION_TIME)?;
        let text = String::from_utf8(answer.body.into());
        text.map_err(|error| ClientError::broken(&answer.path, &error))
    }

    fn change(
        &self,
        method: Method,
        path: &str,
        body: Option<&impl Serialize>,
    ) -> Result<Answer, ClientError> {
        let body = body.map(serde_json::to_vec).transpose();
        let body = body.map_err(|error| ClientError::System(error.into()))?;
        self.ask(&method, path, body, CHANGE_TIME)
    }

    fn ask(
        &self,
        method: &Method,
        path: &str,
        body: Option<Vec<u8>>,
        limit: Duration,
    ) -> Result<Answer, ClientError> {
        self.runtime.block_on(async {
            let asked = async {
                let (path, response) = self.request(method, path, body).await?;
                let body = good(&path, response).await?.collect().await;
                let body = body.map_err(|error| ClientError::broken(&path, &error))?;
                Ok(Answer {
                    body: body.to_bytes(),
                    path,
                })
            };
            let answer = tokio::time::timeout(limit, asked).await;
            answer.map_err(|_| self.timed_out())?
        })
    }

    fn timed_out(&self) -> ClientError {
        ClientError::TimedOut(self.paths.first().cloned().unwrap_or_default())
    }

    /// Connects to the first control socket that accepts a connection.
    async fn connect(&self) -> Result<(&Path, UnixStream), ClientError> {
        let mut tried = Vec::new();
        for path in &self.paths {
            match UnixStream::connect(path).await {
                Ok(stream) => return Ok((path, stream)),
                Err(error) => tried.push((path.clone(), error)),
            }
        }
        Err(ClientError::NotThere(tried))
    }

    async fn request(
        &self,
        method: &Method,
        uri: &str,
        body: Option<Vec<u8>>,
    ) -> Result<(PathBuf, Response<Incoming>), ClientError> {
        let (path, stream) = self.connect().await?;
        let failed = |error: hyper::Error| ClientError::of_exchange(path, &error);
        let (mut sender, connection) = http1::handshake(Io(stream)).await.map_err(failed)?;
        // The connection is polled as long as the caller waits; its error is the request's, too.
        self.runtime.spawn(async {
            let _ = connection.await;
        });
        let request = Request::builder()
            .method(method)
            .uri(uri)
            .header(header::HOST, "localhost")
            .header(header::CONTENT_TYPE, "application/json")
            .body(Full::<Bytes>::from(body.unwrap_or_default()));
        let request = request.map_err(|error| ClientError::broken(path, &error))?;
        let response = sender.send_request(request).await.map_err(failed)?;
        Ok((path.to_owned(), response))
    }
}

/// Returns the body of a successful answer, or the refusal as an error.
async fn good(path: &Path, response: Response<Incoming>) -> Result<Incoming, ClientError> {
    let status = response.status();
    let body = response.into_body();
    if status.is_success() {
        return Ok(body);
    }
    let collected = body.collect().await;
    let text = collected.map(http_body_util::Collected::to_bytes);
    let text = text.unwrap_or_default();
    let message = match serde_json::from_slice::<ErrorBody>(&text) {
        Ok(body) => body.error,
        Err(_) if status == StatusCode::NOT_FOUND => "this is not vnvme's API".to_owned(),
        Err(_) => format!("status {status}"),
    };
    Err(ClientError::Refused {
        path: path.to_owned(),
        status: status.as_u16(),
        message,
    })
}
