-- An event that belongs to no other script. One that is told under a lease needs that lease; one
-- that is to be `above` a time has a later one, or the next after all that are there.
local seen = replayed()
if seen then return seen end
if a.name and not holds(a.name, a.token) then return fenced(a.name) end
local told = {err = 'not told yet'}
if a.above then
  told = redis.pcall('XADD', MESH .. ':events', string.format('%.0f-0', math.max(NOW, a.above + 1)),
    'kind', a.kind, 'fields', '{}', 'extra', a.fields)
end
if type(told) == 'table' then event(a.kind, nil, a.fields) end
return done({appended = true})
