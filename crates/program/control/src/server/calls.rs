//! Handlers of all requests, with their descriptions for the OpenAPI document.

use super::openapi;
use super::route::{Arguments, Reply};
use crate::api::{
    AnaChange, AnaStatus, DeviceStatus, Disk, ErrorBody, ErrorChange, Export, LimitChange,
    Namespace, NewDisk, NewExport, PathChange, PathState, Plan, Resize, Stats, VolumeErrors,
    VolumeLimits,
};
use crate::daemon::Daemon;
use crate::error::Error;
use hyper::StatusCode;
use serde_json::{Map, Value};

type CallResult = Result<Reply, Error>;

/// List disks
#[utoipa::path(get, path = "/v1/disks", tag = "disks", responses(
    (status = 200, body = Vec<Disk>, description = "Disks, sorted by name"),
    (status = 503, body = ErrorBody, description = "The process is starting: retry later"),
))]
pub(super) fn list(daemon: &dyn Daemon, _: &Arguments) -> CallResult {
    Reply::json(&daemon.disks()?)
}

/// Show a disk
#[utoipa::path(get, path = "/v1/disks/{name}", tag = "disks",
    params(("name" = String, Path, description = "Name of the disk")),
    responses(
        (status = 200, body = Disk, description = "The disk"),
        (status = 404, body = ErrorBody, description = "No disk has this name"),
    ),
)]
pub(super) fn show(daemon: &dyn Daemon, arguments: &Arguments) -> CallResult {
    Reply::json(&daemon.disk(arguments.path("name"))?)
}

/// Add a disk
#[utoipa::path(post, path = "/v1/disks", tag = "disks", request_body = NewDisk, responses(
    (status = 201, body = Disk, description = "The disk was added"),
    (
        status = 400, body = ErrorBody,
        description = "The table is invalid, or names a missing file"
    ),
    (status = 409, body = ErrorBody, description = "Name, socket or volume is in use"),
    (status = 500, body = ErrorBody, description =
        "The disk could not be opened for another reason"),
    (status = 501, body = ErrorBody, description = "This process cannot add disks"),
))]
pub(super) fn add(daemon: &dyn Daemon, arguments: &Arguments) -> CallResult {
    let NewDisk { kind, table } = arguments.json()?;
    Ok(Reply::json(&daemon.add(kind, table)?)?.with(StatusCode::CREATED))
}

/// Remove a disk
///
/// Outstanding commands complete first. Refused while a client is attached, except with `force`.
#[utoipa::path(delete, path = "/v1/disks/{name}", tag = "disks",
    params(
        ("name" = String, Path, description = "Name of the disk"),
        ("force" = Option<bool>, Query, description = "Remove even while a client is attached"),
    ),
    responses(
        (status = 204, description = "The disk was removed"),
        (status = 404, body = ErrorBody, description = "No disk has this name"),
        (status = 409, body = ErrorBody, description = "A client is attached"),
        (status = 501, body = ErrorBody, description = "This process cannot remove disks"),
    ),
)]
pub(super) fn remove(daemon: &dyn Daemon, arguments: &Arguments) -> CallResult {
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
pub(super) fn accept(daemon: &dyn Daemon, arguments: &Arguments) -> CallResult {
    daemon.accept(arguments.path("name"))?;
    Ok(Reply::done())
}

/// Add a namespace to a controller
///
/// The guest sees the namespace without a reset. The body is a table `[[controller.namespace]]` of
/// the configuration file.
#[utoipa::path(post, path = "/v1/disks/{name}/namespaces", tag = "namespaces",
    params(("name" = String, Path, description = "Name of the disk")),
    request_body = Object,
    responses(
        (status = 201, body = Namespace, description = "The namespace was attached"),
        (
            status = 400, body = ErrorBody,
            description = "The table is invalid, or names a missing file"
        ),
        (status = 404, body = ErrorBody, description = "No disk has this name"),
        (
            status = 409, body = ErrorBody,
            description = "Namespace ID or volume is in use, or the disk is not a controller"
        ),
        (status = 500, body = ErrorBody, description =
        "The volume could not be opened for another reason"),
        (status = 501, body = ErrorBody, description = "This process cannot attach namespaces"),
    ),
)]
pub(super) fn attach(daemon: &dyn Daemon, arguments: &Arguments) -> CallResult {
    let table: Map<String, Value> = arguments.json()?;
    let namespace = daemon.attach(arguments.path("name"), table)?;
    Ok(Reply::json(&namespace)?.with(StatusCode::CREATED))
}

/// Detach a namespace from a controller
///
/// Outstanding commands of the namespace complete first; the guest sees the change without a reset.
#[utoipa::path(delete, path = "/v1/disks/{name}/namespaces/{nsid}", tag = "namespaces",
    params(
        ("name" = String, Path, description = "Name of the disk"),
        ("nsid" = u32, Path, description = "Namespace ID"),
    ),
    responses(
        (status = 204, description = "The namespace was detached"),
        (status = 404, body = ErrorBody, description = "No such disk or namespace"),
        (status = 409, body = ErrorBody, description = "The disk is not a controller"),
        (status = 501, body = ErrorBody, description = "This process cannot detach namespaces"),
    ),
)]
pub(super) fn detach(daemon: &dyn Daemon, arguments: &Arguments) -> CallResult {
    daemon.detach(arguments.path("name"), arguments.nsid()?)?;
    Ok(Reply::done())
}

/// Resize a namespace
///
/// The volume is resized, too. The namespace of a vhost-user-blk or ublk disk has ID 1.
#[utoipa::path(patch, path = "/v1/disks/{name}/namespaces/{nsid}", tag = "namespaces",
    params(
        ("name" = String, Path, description = "Name of the disk"),
        ("nsid" = u32, Path, description = "Namespace ID"),
    ),
    request_body = Resize,
    responses(
        (status = 200, body = Namespace, description = "The namespace with its new size"),
        (status = 400, body = ErrorBody, description = "The volume cannot have this size"),
        (status = 404, body = ErrorBody, description = "No such disk or namespace"),
        (
            status = 409, body = ErrorBody,
            description = "The volume has a fixed size, or would shrink while a client is attached"
        ),
        (status = 501, body = ErrorBody, description = "This process cannot resize disks"),
    ),
)]
pub(super) fn resize(daemon: &dyn Daemon, arguments: &Arguments) -> CallResult {
    let Resize { bytes } = arguments.json()?;
    let namespace = daemon.resize(arguments.path("name"), arguments.nsid()?, bytes)?;
    Reply::json(&namespace)
}

/// List exports
#[utoipa::path(get, path = "/v1/exports", tag = "exports", responses(
    (status = 200, body = Vec<Export>, description = "Exports, sorted by disk"),
    (status = 503, body = ErrorBody, description = "The process is starting: retry later"),
))]
pub(super) fn list_exports(daemon: &dyn Daemon, _: &Arguments) -> CallResult {
    Reply::json(&daemon.exports()?)
}

/// Export a disk over NBD
///
/// A read-only export shows the disk as it is at the moment of each read. A writable export needs a
/// disk without a client, and keeps clients from connecting to it. Exports end with the process.
#[utoipa::path(post, path = "/v1/exports", tag = "exports", request_body = NewExport, responses(
    (status = 201, body = Export, description = "The disk is exported"),
    (status = 400, body = ErrorBody, description = "The address is invalid or not allowed"),
    (status = 404, body = ErrorBody, description = "No such disk or namespace"),
    (status = 409, body = ErrorBody, description = "Disk or socket is in use"),
    (status = 500, body = ErrorBody, description =
        "The export could not be made for another reason"),
    (status = 501, body = ErrorBody, description = "This process cannot export disks"),
))]
pub(super) fn export(daemon: &dyn Daemon, arguments: &Arguments) -> CallResult {
    let export: NewExport = arguments.json()?;
    Ok(Reply::json(&daemon.export(&export)?)?.with(StatusCode::CREATED))
}

/// End the exports of a disk
///
/// Clients are disconnected, and sockets removed.
#[utoipa::path(delete, path = "/v1/exports/{name}", tag = "exports",
    params(("name" = String, Path, description = "Name of the disk")),
    responses(
        (status = 204, description = "The exports have ended"),
        (status = 404, body = ErrorBody, description = "The disk has no export"),
    ),
)]
pub(super) fn unexport(daemon: &dyn Daemon, arguments: &Arguments) -> CallResult {
    daemon.unexport(arguments.path("name"))?;
    Ok(Reply::done())
}

/// Apply a configuration
///
/// The body is a configuration file as JSON. Disks are added, removed and changed until they match
/// it. If any change is impossible, nothing is changed, and `refused` lists the reasons.
#[utoipa::path(post, path = "/v1/apply", tag = "configuration",
    params(("dry-run" = Option<bool>, Query, description = "Only plan the changes")),
    request_body = Object,
    responses(
        (status = 200, body = Plan, description = "Changes made or planned, or reasons for refusal"),
        (
            status = 400, body = ErrorBody,
            description = "The configuration is invalid, or names a missing file"
        ),
        (status = 409, body = ErrorBody, description = "A name, socket or volume is in use"),
        (status = 500, body = ErrorBody, description = "A change failed midway"),
        (status = 501, body = ErrorBody, description = "This process cannot apply configurations"),
    ),
)]
pub(super) fn apply(daemon: &dyn Daemon, arguments: &Arguments) -> CallResult {
    let dry_run = arguments.switch("dry-run")?;
    Reply::json(&daemon.apply(arguments.json()?, dry_run)?)
}

/// Reread and apply the configuration file
#[utoipa::path(post, path = "/v1/reload", tag = "configuration", responses(
    (status = 200, body = Plan, description = "Changes made, or reasons for refusal"),
    (status = 400, body = ErrorBody, description = "The configuration file cannot be read"),
    (status = 501, body = ErrorBody, description =
        "The process was started without a configuration file"),
))]
pub(super) fn reload(daemon: &dyn Daemon, _: &Arguments) -> CallResult {
    Reply::json(&daemon.reload()?)
}

/// Show the running configuration
#[utoipa::path(get, path = "/v1/config", tag = "configuration", responses(
    (status = 200, body = String, content_type = "application/toml", description = "Configuration file"),
    (status = 501, body = ErrorBody, description = "This process cannot export its configuration"),
))]
pub(super) fn save(daemon: &dyn Daemon, _: &Arguments) -> CallResult {
    Ok(Reply::text("application/toml", daemon.save()?))
}

/// Show all counters
#[utoipa::path(get, path = "/v1/stats", tag = "counters", responses(
    (status = 200, body = Stats, description = "Present counters"),
))]
pub(super) fn stats(daemon: &dyn Daemon, _: &Arguments) -> CallResult {
    Reply::json(&daemon.stats())
}

/// Show metrics in Prometheus' text format
#[utoipa::path(get, path = "/metrics", tag = "counters", responses(
    (
        status = 200, body = String, content_type = "text/plain",
        description = "Prometheus' text format"
    ),
    (status = 501, body = ErrorBody, description = "This program is built without metrics"),
))]
pub(super) fn metrics(daemon: &dyn Daemon, _: &Arguments) -> CallResult {
    let kind = "text/plain; version=0.0.4; charset=utf-8";
    Ok(Reply::text(kind, daemon.metrics()?))
}

/// Show the disks in a browser
#[utoipa::path(get, path = "/", tag = "counters", responses(
    (status = 200, body = String, content_type = "text/html", description = "HTML page"),
    (status = 501, body = ErrorBody, description = "This program is built without the page"),
))]
pub(super) fn page(daemon: &dyn Daemon, _: &Arguments) -> CallResult {
    Ok(Reply::text("text/html; charset=utf-8", daemon.page()?))
}

/// Show this description
#[utoipa::path(get, path = "/v1/openapi.json", tag = "about", responses(
    (status = 200, body = Object, description = "OpenAPI document"),
))]
pub(super) fn openapi(_: &dyn Daemon, _: &Arguments) -> CallResult {
    Ok(Reply::text("application/json", openapi::document()))
}

/// List limits and weights of volumes
#[utoipa::path(get, path = "/v1/limits", tag = "limits", responses(
    (status = 200, body = Vec<VolumeLimits>, description = "Volumes with limits or a weight"),
))]
pub(super) fn list_limits(daemon: &dyn Daemon, _: &Arguments) -> CallResult {
    Reply::json(&daemon.limits(&LimitChange::default())?)
}

/// Change limits and weights
#[utoipa::path(patch, path = "/v1/limits", tag = "limits", request_body = LimitChange, responses(
    (status = 200, body = Vec<VolumeLimits>, description = "Selected volumes"),
    (status = 400, body = ErrorBody, description = "The request selects no volume"),
    (status = 404, body = ErrorBody, description = "No such disk or volume"),
    (status = 409, body = ErrorBody, description = "A selected volume has no limits or no weight"),
))]
pub(super) fn limits(daemon: &dyn Daemon, arguments: &Arguments) -> CallResult {
    let change: LimitChange = arguments.json()?;
    change.check().map_err(Error::invalid)?;
    Reply::json(&daemon.limits(&change)?)
}

/// List error policies of volumes
#[utoipa::path(get, path = "/v1/on-error", tag = "errors", responses(
    (status = 200, body = Vec<VolumeErrors>, description = "Present policies and counters"),
))]
pub(super) fn list_on_error(daemon: &dyn Daemon, _: &Arguments) -> CallResult {
    Reply::json(&daemon.on_error(&ErrorChange::default())?)
}

/// Change error policies, or resume a disk
#[utoipa::path(patch, path = "/v1/on-error", tag = "errors", request_body = ErrorChange,
    responses(
        (status = 200, body = Vec<VolumeErrors>, description = "Selected volumes"),
        (status = 400, body = ErrorBody, description = "The request selects no volume"),
        (status = 404, body = ErrorBody, description = "No such disk or volume"),
    ),
)]
pub(super) fn on_error(daemon: &dyn Daemon, arguments: &Arguments) -> CallResult {
    let change: ErrorChange = arguments.json()?;
    change.check().map_err(Error::invalid)?;
    Reply::json(&daemon.on_error(&change)?)
}

/// List paths of namespaces to devices
#[utoipa::path(get, path = "/v1/paths", tag = "devices", responses(
    (status = 200, body = Vec<PathState>, description = "Namespaces with a direct path"),
))]
pub(super) fn list_paths(daemon: &dyn Daemon, _: &Arguments) -> CallResult {
    Reply::json(&daemon.path(&PathChange::default())?)
}

/// Change paths of namespaces to devices
#[utoipa::path(patch, path = "/v1/paths", tag = "devices", request_body = PathChange, responses(
    (status = 200, body = Vec<PathState>, description = "Selected namespaces"),
    (status = 400, body = ErrorBody, description = "The request selects no namespace"),
    (
        status = 404, body = ErrorBody,
        description = "No such disk, or it has no direct path"
    ),
))]
pub(super) fn paths(daemon: &dyn Daemon, arguments: &Arguments) -> CallResult {
    let change: PathChange = arguments.json()?;
    change.check().map_err(Error::invalid)?;
    Reply::json(&daemon.path(&change)?)
}

/// List ANA states of disks in subsystems
#[utoipa::path(get, path = "/v1/ana", tag = "namespaces", responses(
    (status = 200, body = Vec<AnaStatus>, description = "Present states"),
))]
pub(super) fn list_ana(daemon: &dyn Daemon, _: &Arguments) -> CallResult {
    Reply::json(&daemon.ana(&AnaChange::default())?)
}

/// Change ANA states of a disk
///
/// The disk's host is notified. Outstanding commands complete as before; the answer follows when no
/// command remains that the new state refuses.
#[utoipa::path(patch, path = "/v1/ana", tag = "namespaces", request_body = AnaChange, responses(
    (status = 200, body = Vec<AnaStatus>, description = "Selected groups"),
    (status = 400, body = ErrorBody, description = "The request names no disk"),
    (status = 404, body = ErrorBody, description = "No such disk or group"),
    (status = 409, body = ErrorBody, description = "The disk is in no subsystem"),
    (
        status = 500, body = ErrorBody,
        description = "The state was changed, and outstanding commands of before do not complete"
    ),
))]
pub(super) fn ana(daemon: &dyn Daemon, arguments: &Arguments) -> CallResult {
    let change: AnaChange = arguments.json()?;
    change.check().map_err(Error::invalid)?;
    Reply::json(&daemon.ana(&change)?)
}

/// List devices below volumes
#[utoipa::path(get, path = "/v1/devices", tag = "devices", responses(
    (status = 200, body = Vec<DeviceStatus>, description = "Present states"),
))]
pub(super) fn list_devices(daemon: &dyn Daemon, _: &Arguments) -> CallResult {
    Reply::json(&daemon.stats().devices)
}

/// Suspend a device
///
/// For a reset, power loss or firmware update: commands of its guests wait until it is resumed.
#[utoipa::path(post, path = "/v1/devices/{address}/suspend", tag = "devices",
    params(("address" = String, Path, description = "PCI address, or the device's URL")),
    responses(
        (status = 200, body = DeviceStatus, description = "State of the device"),
        (status = 404, body = ErrorBody, description = "No such device"),
        (status = 409, body = ErrorBody, description = "The device is already suspended, or gone"),
    ),
)]
pub(super) fn suspend(daemon: &dyn Daemon, arguments: &Arguments) -> CallResult {
    Reply::json(&daemon.suspend(arguments.path("address"))?)
}

/// Resume a suspended device
///
/// Waiting commands are repeated.
#[utoipa::path(post, path = "/v1/devices/{address}/resume", tag = "devices",
    params(("address" = String, Path, description = "PCI address, or the device's URL")),
    responses(
        (status = 200, body = DeviceStatus, description = "State of the device"),
        (status = 404, body = ErrorBody, description = "No such device"),
        (status = 409, body = ErrorBody, description = "The device is not suspended, or gone"),
    ),
)]
pub(super) fn resume(daemon: &dyn Daemon, arguments: &Arguments) -> CallResult {
    Reply::json(&daemon.resume(arguments.path("address"))?)
}

/// Replace this process by the binary now installed at its path
///
/// Clients of the disks notice a pause. A successful upgrade closes the connection without an
/// answer. The result is in `measured.process` of `/v1/stats`: fields `ready` and `last_end`.
#[utoipa::path(post, path = "/v1/upgrade", tag = "configuration", responses(
    (status = 409, body = ErrorBody, description =
        "The installed program cannot replace this one, or is missing"),
    (status = 501, body = ErrorBody, description = "No keeper holds the disks of this process"),
))]
pub(super) fn upgrade(daemon: &dyn Daemon, _: &Arguments) -> CallResult {
    match daemon.upgrade()? {}
}

/// Stream events
///
/// Server-sent events: the event's name is its kind, its data an `Event`. An event `lost` has the
/// number of events that this client was too slow for.
#[utoipa::path(get, path = "/v1/events", tag = "events", responses(
    (status = 200, body = crate::api::Event, content_type = "text/event-stream",
        description = "Stream that ends with the client or the process"),
    (status = 503, body = ErrorBody, description = "Too many clients listen to events"),
))]
#[allow(dead_code)] // The server answers these requests itself.
pub(super) fn events() {}
