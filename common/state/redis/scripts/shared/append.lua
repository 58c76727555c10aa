-- Appends an event that belongs to no other script. With `name` the caller must hold that lease.
-- With `above` (ms) the event gets a later id than that time, or else the next id after the
-- existing ones.
local previous = previous_reply()
if previous then return previous end
if args.name and not has_lease(args.name, args.token) then return reject_fenced(args.name) end
local appended = {err = 'not appended yet'}
if args.above then
  appended = redis.pcall('XADD', MESH .. ':events',
    string.format('%.0f-0', math.max(NOW, args.above + 1)),
    'kind', args.kind, 'fields', '{}', 'extra', args.fields)
end
if type(appended) == 'table' then append_event(args.kind, nil, args.fields) end
return reply({appended = true})
