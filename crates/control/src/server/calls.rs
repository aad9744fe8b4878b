//! Handlers of all requests, with their descriptions for the OpenAPI document.

use super::openapi;
use super::route::{Arguments, Reply};
use crate::api::{
    AnaChange, AnaStatus, DeviceStatus, Disk, ErrorBody, ErrorChange, LimitChange, Namespace,
    NewDisk, PathChange, PathState, Plan, Resize, Stats, VolumeErrors, VolumeLimits,
};
use crate::daemon::Daemon;
use crate::error::Error;
use hyper::StatusCode;
use serde_json::{Map, Value};

type Outcome = Result<Reply, Error>;

/// All disks, sorted by their names
#[utoipa::path(get, path = "/v1/disks", tag = "disks", responses(
    (status = 200, body = Vec<Disk>, description = "The disks"),
    (status = 503, body = ErrorBody, description = "The process is starting: ask again later"),
))]
pub(super) fn list(daemon: &dyn Daemon, _: &Arguments) -> Outcome {
    Reply::json(&daemon.disks()?)
}

/// A disk
#[utoipa::path(get, path = "/v1/disks/{name}", tag = "disks",
    params(("name" = String, Path, description = "The disk's name")),
    responses(
        (status = 200, body = Disk, description = "The disk"),
        (status = 404, body = ErrorBody, description = "There is none of this name"),
    ),
)]
pub(super) fn show(daemon: &dyn Daemon, arguments: &Arguments) -> Outcome {
    Reply::json(&daemon.disk(arguments.path("name"))?)
}

/// Serve a further disk
#[utoipa::path(post, path = "/v1/disks", tag = "disks", request_body = NewDisk, responses(
    (status = 201, body = Disk, description = "It is served"),
    (
        status = 400, body = ErrorBody,
        description = "The table is wrong, or names something that is not there"
    ),
    (status = 409, body = ErrorBody, description = "Its name, socket or volume is taken"),
    (status = 500, body = ErrorBody, description = "It could not be opened for another reason"),
    (status = 501, body = ErrorBody, description = "This process cannot add disks"),
))]
pub(super) fn add(daemon: &dyn Daemon, arguments: &Arguments) -> Outcome {
    let NewDisk { kind, table } = arguments.json()?;
    Ok(Reply::json(&daemon.add(kind, table)?)?.with(StatusCode::CREATED))
}

/// Stop serving a disk
///
/// What is in flight ends first. Refused while a client is attached, unless it is forced.
#[utoipa::path(delete, path = "/v1/disks/{name}", tag = "disks",
    params(
        ("name" = String, Path, description = "The disk's name"),
        ("force" = Option<bool>, Query, description = "Also while a client is attached"),
    ),
    responses(
        (status = 204, description = "It is removed"),
        (status = 404, body = ErrorBody, description = "There is none of this name"),
        (status = 409, body = ErrorBody, description = "A client is attached"),
        (status = 501, body = ErrorBody, description = "This process cannot remove disks"),
    ),
)]
pub(super) fn remove(daemon: &dyn Daemon, arguments: &Arguments) -> Outcome {
    daemon.remove(arguments.path("name"), arguments.switch("force")?)?;
    Ok(Reply::done())
}

/// Confirm the new volumes of a disk
///
/// A disk is unavailable where a guest is attached and another file or volume is at the place of
/// its volume. This confirms that the new one is to be the guest's.
#[utoipa::path(post, path = "/v1/disks/{name}/accept", tag = "disks",
    params(("name" = String, Path, description = "The disk's name")),
    responses(
        (status = 204, description = "It is confirmed, and the disk is tried again"),
        (status = 404, body = ErrorBody, description = "There is none of this name"),
        (status = 409, body = ErrorBody, description = "The disk does not wait for that"),
    ),
)]
pub(super) fn accept(daemon: &dyn Daemon, arguments: &Arguments) -> Outcome {
    daemon.accept(arguments.path("name"))?;
    Ok(Reply::done())
}

/// Add a namespace to a controller
///
/// Its client sees it without a reset. The body is a table `[[controller.namespace]]` of the
/// configuration file.
#[utoipa::path(post, path = "/v1/disks/{name}/namespaces", tag = "namespaces",
    params(("name" = String, Path, description = "The disk's name")),
    request_body = Object,
    responses(
        (status = 201, body = Namespace, description = "It is attached"),
        (
            status = 400, body = ErrorBody,
            description = "The table is wrong, or names something that is not there"
        ),
        (status = 404, body = ErrorBody, description = "There is no disk of this name"),
        (
            status = 409, body = ErrorBody,
            description = "The namespace ID or the volume is taken, or the disk is no controller"
        ),
        (status = 500, body = ErrorBody, description = "It could not be opened for another reason"),
        (status = 501, body = ErrorBody, description = "This process cannot attach namespaces"),
    ),
)]
pub(super) fn attach(daemon: &dyn Daemon, arguments: &Arguments) -> Outcome {
    let table: Map<String, Value> = arguments.json()?;
    let namespace = daemon.attach(arguments.path("name"), table)?;
    Ok(Reply::json(&namespace)?.with(StatusCode::CREATED))
}

/// Remove a namespace of a controller
///
/// What is in flight on it ends first; its client sees it without a reset.
#[utoipa::path(delete, path = "/v1/disks/{name}/namespaces/{nsid}", tag = "namespaces",
    params(
        ("name" = String, Path, description = "The disk's name"),
        ("nsid" = u32, Path, description = "Namespace ID"),
    ),
    responses(
        (status = 204, description = "It is detached"),
        (status = 404, body = ErrorBody, description = "There is no such disk or namespace"),
        (status = 409, body = ErrorBody, description = "The disk is no controller"),
        (status = 501, body = ErrorBody, description = "This process cannot detach namespaces"),
    ),
)]
pub(super) fn detach(daemon: &dyn Daemon, arguments: &Arguments) -> Outcome {
    daemon.detach(arguments.path("name"), arguments.nsid()?)?;
    Ok(Reply::done())
}

/// Change the size of a namespace
///
/// Its volume, too, gets the size. The only namespace of a disk that is no controller has the
/// ID 1.
#[utoipa::path(patch, path = "/v1/disks/{name}/namespaces/{nsid}", tag = "namespaces",
    params(
        ("name" = String, Path, description = "The disk's name"),
        ("nsid" = u32, Path, description = "Namespace ID"),
    ),
    request_body = Resize,
    responses(
        (status = 200, body = Namespace, description = "As it is then"),
        (status = 400, body = ErrorBody, description = "The volume cannot have that size"),
        (status = 404, body = ErrorBody, description = "There is no such disk or namespace"),
        (
            status = 409, body = ErrorBody,
            description = "The volume's size is fixed, or a client is attached and it would shrink"
        ),
        (status = 501, body = ErrorBody, description = "This process cannot resize disks"),
    ),
)]
pub(super) fn resize(daemon: &dyn Daemon, arguments: &Arguments) -> Outcome {
    let Resize { bytes } = arguments.json()?;
    let namespace = daemon.resize(arguments.path("name"), arguments.nsid()?, bytes)?;
    Reply::json(&namespace)
}

/// Make what is served be what a configuration says
///
/// The body has what a configuration file has, as JSON. New disks are added, others removed or
/// changed; if anything cannot be done, nothing is, and `refused` says why.
#[utoipa::path(post, path = "/v1/apply", tag = "configuration",
    params(("dry-run" = Option<bool>, Query, description = "Only tell what would be done")),
    request_body = Object,
    responses(
        (status = 200, body = Plan, description = "What was done, or what cannot be"),
        (
            status = 400, body = ErrorBody,
            description = "It is no configuration, or names something that is not there"
        ),
        (status = 409, body = ErrorBody, description = "Something of it is taken"),
        (status = 500, body = ErrorBody, description = "Something failed on the way"),
        (status = 501, body = ErrorBody, description = "This process cannot apply one"),
    ),
)]
pub(super) fn apply(daemon: &dyn Daemon, arguments: &Arguments) -> Outcome {
    let dry_run = arguments.switch("dry-run")?;
    Reply::json(&daemon.apply(arguments.json()?, dry_run)?)
}

/// Read the configuration again, and apply it
#[utoipa::path(post, path = "/v1/reload", tag = "configuration", responses(
    (status = 200, body = Plan, description = "What was done, or what cannot be"),
    (status = 400, body = ErrorBody, description = "It cannot be read"),
    (status = 501, body = ErrorBody, description = "The process was started without one"),
))]
pub(super) fn reload(daemon: &dyn Daemon, _: &Arguments) -> Outcome {
    Reply::json(&daemon.reload()?)
}

/// What is served now, as a configuration file
#[utoipa::path(get, path = "/v1/config", tag = "configuration", responses(
    (status = 200, body = String, content_type = "application/toml", description = "TOML"),
    (status = 501, body = ErrorBody, description = "This process cannot tell"),
))]
pub(super) fn save(daemon: &dyn Daemon, _: &Arguments) -> Outcome {
    Ok(Reply::text("application/toml", daemon.save()?))
}

/// Counters of everything
#[utoipa::path(get, path = "/v1/stats", tag = "counters", responses(
    (status = 200, body = Stats, description = "As they are now"),
))]
pub(super) fn stats(daemon: &dyn Daemon, _: &Arguments) -> Outcome {
    Reply::json(&daemon.stats())
}

/// Counters for monitoring
#[utoipa::path(get, path = "/metrics", tag = "counters", responses(
    (
        status = 200, body = String, content_type = "text/plain",
        description = "Prometheus' text form"
    ),
    (status = 501, body = ErrorBody, description = "This program has none"),
))]
pub(super) fn metrics(daemon: &dyn Daemon, _: &Arguments) -> Outcome {
    let kind = "text/plain; version=0.0.4; charset=utf-8";
    Ok(Reply::text(kind, daemon.metrics()?))
}

/// The disks, for a browser
#[utoipa::path(get, path = "/", tag = "counters", responses(
    (status = 200, body = String, content_type = "text/html", description = "A page"),
    (status = 501, body = ErrorBody, description = "This program has none"),
))]
pub(super) fn page(daemon: &dyn Daemon, _: &Arguments) -> Outcome {
    Ok(Reply::text("text/html; charset=utf-8", daemon.page()?))
}

/// This description
#[utoipa::path(get, path = "/v1/openapi.json", tag = "about", responses(
    (status = 200, body = Object, description = "An OpenAPI document"),
))]
pub(super) fn openapi(_: &dyn Daemon, _: &Arguments) -> Outcome {
    Ok(Reply::text("application/json", openapi::document()))
}

/// Limits and weights of all volumes that have any
#[utoipa::path(get, path = "/v1/limits", tag = "limits", responses(
    (status = 200, body = Vec<VolumeLimits>, description = "As they are now"),
))]
pub(super) fn list_limits(daemon: &dyn Daemon, _: &Arguments) -> Outcome {
    Reply::json(&daemon.limits(&LimitChange::default())?)
}

/// Change limits and weights
#[utoipa::path(patch, path = "/v1/limits", tag = "limits", request_body = LimitChange, responses(
    (status = 200, body = Vec<VolumeLimits>, description = "Of the volumes that were meant"),
    (status = 400, body = ErrorBody, description = "It does not say what is to change"),
    (status = 404, body = ErrorBody, description = "There is no such disk or volume"),
    (status = 409, body = ErrorBody, description = "It has no limits or no weight"),
))]
pub(super) fn limits(daemon: &dyn Daemon, arguments: &Arguments) -> Outcome {
    let change: LimitChange = arguments.json()?;
    change.check().map_err(Error::invalid)?;
    Reply::json(&daemon.limits(&change)?)
}

/// What becomes of requests that fail, of all volumes
#[utoipa::path(get, path = "/v1/on-error", tag = "errors", responses(
    (status = 200, body = Vec<VolumeErrors>, description = "As it is now"),
))]
pub(super) fn list_on_error(daemon: &dyn Daemon, _: &Arguments) -> Outcome {
    Reply::json(&daemon.on_error(&ErrorChange::default())?)
}

/// Change what becomes of requests that fail, or resume a disk
#[utoipa::path(patch, path = "/v1/on-error", tag = "errors", request_body = ErrorChange,
    responses(
        (status = 200, body = Vec<VolumeErrors>, description = "Of the volumes that were meant"),
        (status = 400, body = ErrorBody, description = "It does not say what is to change"),
        (status = 404, body = ErrorBody, description = "There is no such disk or volume"),
    ),
)]
pub(super) fn on_error(daemon: &dyn Daemon, arguments: &Arguments) -> Outcome {
    let change: ErrorChange = arguments.json()?;
    change.check().map_err(Error::invalid)?;
    Reply::json(&daemon.on_error(&change)?)
}

/// Paths of all namespaces that have a direct one to a device
#[utoipa::path(get, path = "/v1/paths", tag = "devices", responses(
    (status = 200, body = Vec<PathState>, description = "As they are now"),
))]
pub(super) fn list_paths(daemon: &dyn Daemon, _: &Arguments) -> Outcome {
    Reply::json(&daemon.path(&PathChange::default())?)
}

/// Change how namespaces reach a device
#[utoipa::path(patch, path = "/v1/paths", tag = "devices", request_body = PathChange, responses(
    (status = 200, body = Vec<PathState>, description = "Of the namespaces that were meant"),
    (status = 400, body = ErrorBody, description = "It does not say whose"),
    (
        status = 404, body = ErrorBody,
        description = "There is no such disk, or it has no direct path"
    ),
))]
pub(super) fn paths(daemon: &dyn Daemon, arguments: &Arguments) -> Outcome {
    let change: PathChange = arguments.json()?;
    change.check().map_err(Error::invalid)?;
    Reply::json(&daemon.path(&change)?)
}

/// How the disks of subsystems reach the groups of their namespaces
#[utoipa::path(get, path = "/v1/ana", tag = "namespaces", responses(
    (status = 200, body = Vec<AnaStatus>, description = "As they are now"),
))]
pub(super) fn list_ana(daemon: &dyn Daemon, _: &Arguments) -> Outcome {
    Reply::json(&daemon.ana(&AnaChange::default())?)
}

/// Change how a disk of a subsystem reaches a group of its namespaces
///
/// Its host is told. Commands that came before end as they would have; the answer comes when
/// there are none left that the new state would have refused.
#[utoipa::path(patch, path = "/v1/ana", tag = "namespaces", request_body = AnaChange, responses(
    (status = 200, body = Vec<AnaStatus>, description = "Of the groups that were meant"),
    (status = 400, body = ErrorBody, description = "It does not say whose"),
    (status = 404, body = ErrorBody, description = "There is no such disk, or no such group"),
    (status = 409, body = ErrorBody, description = "The disk is in no subsystem"),
    (
        status = 500, body = ErrorBody,
        description = "The state has changed, and commands that came before do not end"
    ),
))]
pub(super) fn ana(daemon: &dyn Daemon, arguments: &Arguments) -> Outcome {
    let change: AnaChange = arguments.json()?;
    change.check().map_err(Error::invalid)?;
    Reply::json(&daemon.ana(&change)?)
}

/// Devices below
#[utoipa::path(get, path = "/v1/devices", tag = "devices", responses(
    (status = 200, body = Vec<DeviceStatus>, description = "As they are now"),
))]
pub(super) fn list_devices(daemon: &dyn Daemon, _: &Arguments) -> Outcome {
    Reply::json(&daemon.stats().devices)
}

/// Shut a device down
///
/// For a reset, loss of power or new firmware: its guests' commands wait until it is resumed.
#[utoipa::path(post, path = "/v1/devices/{address}/suspend", tag = "devices",
    params(("address" = String, Path, description = "PCI address, or the device's URL")),
    responses(
        (status = 200, body = DeviceStatus, description = "As it is then"),
        (status = 404, body = ErrorBody, description = "There is no such device"),
        (status = 409, body = ErrorBody, description = "It is suspended, or gone"),
    ),
)]
pub(super) fn suspend(daemon: &dyn Daemon, arguments: &Arguments) -> Outcome {
    Reply::json(&daemon.suspend(arguments.path("address"))?)
}

/// Bring a suspended device up again
///
/// The commands that wait are repeated.
#[utoipa::path(post, path = "/v1/devices/{address}/resume", tag = "devices",
    params(("address" = String, Path, description = "PCI address, or the device's URL")),
    responses(
        (status = 200, body = DeviceStatus, description = "As it is then"),
        (status = 404, body = ErrorBody, description = "There is no such device"),
        (status = 409, body = ErrorBody, description = "It is not suspended, or gone"),
    ),
)]
pub(super) fn resume(daemon: &dyn Daemon, arguments: &Arguments) -> Outcome {
    Reply::json(&daemon.resume(arguments.path("address"))?)
}

/// Have another version take the place of this process
///
/// The program that is now where this one was found: clients of its disks notice a pause. The
/// connection ends then without an answer. From `/v1/stats`, asked anew, follows how it went:
/// `measured.process` has `ready`, and `last_end`.
#[utoipa::path(post, path = "/v1/upgrade", tag = "configuration", responses(
    (status = 409, body = ErrorBody, description = "The program there does not fit, or there is none"),
    (status = 501, body = ErrorBody, description = "Nobody keeps this process's disks meanwhile"),
))]
pub(super) fn upgrade(daemon: &dyn Daemon, _: &Arguments) -> Outcome {
    match daemon.upgrade()? {}
}

/// What happens, as it happens
///
/// Server-sent events: the name of each is its kind, its data an `Event`. One that says `lost`
/// has the number of events that this client was too slow for.
#[utoipa::path(get, path = "/v1/events", tag = "events", responses(
    (status = 200, body = crate::api::Event, content_type = "text/event-stream",
        description = "Until one of both ends it"),
    (status = 503, body = ErrorBody, description = "Too many clients listen"),
))]
#[allow(dead_code)] // The server answers it itself; this is its description.
pub(super) fn events() {}
